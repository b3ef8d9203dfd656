"""Random mixed load on a scheduler with too few blocks: every request ends once, with the tokens it gets alone."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.scheduler_loop import JSON, Client, SchedulerLoop, make_request
from support.simulated_runner import reference_output

from kllm.request import Request
from kllm.scheduling.queue_policy import by_priority

VOCAB = 48
EOS = 0


def make_load(rng: random.Random, count: int, capacity: int, max_model_len: int) -> list[Request]:
    """Mixed requests: shared prefixes, tenants, several outputs of one prompt, structured, with limits of all kinds."""
    systems = [[rng.randrange(1, VOCAB) for _ in range(rng.choice((8, 13, 24, 40)))] for _ in range(4)]
    requests: list[Request] = []
    while len(requests) < count:
        number = len(requests)
        prompt = rng.choice(systems)[: rng.choice((100, 7, 16))] if rng.random() < 0.6 else []
        prompt = prompt + [rng.randrange(1, VOCAB) for _ in range(rng.choice((1, 2, 5, 11, 24, 60)))]
        room = min(max_model_len, capacity) - len(prompt)
        if room < 1:
            continue
        fields: dict[str, object] = {
            "max_tokens": rng.choice((1, 2, 9, 20, 50, 90, None)),
            "seed": rng.randrange(100),
            "cache_salt": rng.choice(("", "", "", "blue")),
            "adapter": rng.choice(("", "", "", "lora")),
            "priority": rng.choice((0, 0, -1, 3)),
            "ignore_eos": rng.random() < 0.4,
            "stop_token_ids": tuple(rng.sample(range(1, VOCAB), rng.choice((0, 0, 0, 0, 1)))),
        }
        if fields["max_tokens"] is None and max_model_len > 400:
            fields["max_tokens"] = 30
        if fields["max_tokens"] is not None:
            fields["max_tokens"] = most = min(room, fields["max_tokens"])
            fields["min_tokens"] = rng.choice((0, 0, min(3, most)))
        if rng.random() < 0.15:
            fields["prompt_logprobs"] = 0
        if rng.random() < 0.3:
            fields["logprobs"] = 0
        if rng.random() < 0.15:
            fields["structured_outputs"] = JSON
        leader = f"r{number}"
        requests.append(make_request(leader, prompt, **fields))
        requests += [
            make_request(f"{leader}.{sibling}", prompt, **{**fields, "seed": 1000 + sibling, "leader": leader})
            for sibling in range(rng.choice((0, 0, 0, 1, 3)))
        ]
    return requests[:count]


def check_ends(loop: SchedulerLoop, clients: list[Client], length: int) -> None:
    for client in clients:
        tokens, reason, stop = reference_output(client.request, vocab_size=VOCAB, eos=EOS, length=length)
        last = client.last
        if client.aborted:
            assert client.tokens == tokens[: len(client.tokens)]
        elif last is not None and last.finish_reason == "error":
            assert last.error == "the grammar is wrong"
            assert client.tokens == tokens[: len(client.tokens)]
        else:
            assert last is not None, f"{client.request.request_id} has not ended"
            assert client.tokens == tokens
            assert (last.finish_reason, last.stop_reason) == (reason, stop)
            if client.request.params.prompt_logprobs is not None:
                prompt = client.request.prompt_token_ids
                assert client.prompt_logprobs is not None
                assert client.prompt_logprobs[0] is None
                assert [(e.token_id, e.logprob) for e in client.prompt_logprobs[1:] if e is not None] == [
                    (token, -float(i)) for i, token in enumerate(prompt) if i
                ]
            if client.request.params.logprobs is not None:
                assert sum(len(delta.logprobs or ()) for delta in client.deltas) == len(tokens)


def simulate(seed: int, count: int, depth: int, disturb: bool = True, **options: object) -> SchedulerLoop:
    rng = random.Random(seed)
    max_model_len = int(options.pop("max_model_len", 150))  # type: ignore[call-overload]
    loop = SchedulerLoop(depth=depth, max_model_len=max_model_len, vocab_size=VOCAB, eos=EOS, **options)  # type: ignore[arg-type]
    capacity = loop.kv.pool.num_blocks * loop.kv.block_tokens + 1
    load = make_load(rng, count, capacity, max_model_len)
    clients: list[Client] = []
    held: list[Client] = []
    events = random.Random(seed + 1)
    for _ in range(1000 * count):
        if load and events.random() < 0.5:
            request = load.pop(0)
            hold = request.params.structured_outputs is not None and events.random() < 0.7
            clients.append(loop.add(request, held=hold))
            if hold:
                held.append(clients[-1])
        if disturb and events.random() < 0.04:
            _disturb(loop, events, [client for client in clients if client.open])
        if held and events.random() < 0.2:
            client = held.pop(events.randrange(len(held)))
            if disturb and client.open and events.random() < 0.2:
                loop.fail(client, "the grammar is wrong")
            else:
                loop.scheduler.unhold(client.request.request_id)
                loop.scheduler.check()
        planned = loop.plan() if loop.num_in_flight < depth else None
        if loop.num_in_flight and (planned is None or events.random() < 0.5):
            loop.commit()
        if not (load or held or loop.num_in_flight or loop.scheduler.num_unfinished):
            break
    check_ends(loop, clients, min(capacity, max_model_len))
    loop.check_idle()
    loop.kv.clear()
    loop.kv.check()
    assert loop.kv.pool.num_free == loop.kv.pool.num_blocks
    return loop


def _disturb(loop: SchedulerLoop, events: random.Random, clients: list[Client]) -> None:
    if not clients:
        return
    client = events.choice(clients)
    match events.randrange(4):
        case 0:
            loop.abort(client)
        case 1:
            loop.resubmit(client)
        case 2:
            loop.kv.clear()
        case 3:
            loop.abort(*events.sample(clients, min(2, len(clients))))


TIGHT = {"num_blocks": 40, "block_tokens": 4, "max_num_seqs": 12, "max_tokens_per_step": 32}
VARIANTS: dict[str, dict[str, object]] = {
    "tight": TIGHT,
    "tighter": {**TIGHT, "num_blocks": 26, "max_model_len": 110},
    "roomy": {**TIGHT, "num_blocks": 1000},
    "no-cache": {**TIGHT, "enable_prefix_caching": False},
    "chunks-of-5": {**TIGHT, "prefill_chunk": 5},
    "chunks-of-8": {**TIGHT, "prefill_chunk": 8, "max_tokens_per_step": 64},
    "one-token-steps": {**TIGHT, "max_tokens_per_step": 3},
    "priority": {**TIGHT, "key": by_priority},
    "block-of-one": {**TIGHT, "block_tokens": 1, "num_blocks": 150},
    "big-blocks": {**TIGHT, "block_tokens": 16, "num_blocks": 12},
    "one-row": {**TIGHT, "max_num_seqs": 1},
}


CROWDED = {"tight", "tighter", "no-cache", "chunks-of-8", "priority"}  # variants that must preempt often


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("variant", VARIANTS)
def test_every_request_ends_rightly(variant: str, depth: int) -> None:
    """The engine runs at depth 1 or 2; at 3 a preempted request can be back before its old results are."""
    preemptions = 0
    for seed in range(2 + depth):
        preemptions += simulate(seed, 50, depth, **VARIANTS[variant]).scheduler.num_preemptions
    assert preemptions >= 15 or variant not in CROWDED


@settings(max_examples=80, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    depth=st.sampled_from([1, 2, 3]),
    num_blocks=st.integers(24, 60),
    block_tokens=st.sampled_from([1, 3, 4, 8]),
    max_num_seqs=st.integers(1, 16),
    max_tokens_per_step=st.integers(1, 64),
    prefill_chunk=st.none() | st.integers(1, 40),
    enable_prefix_caching=st.booleans(),
)
def test_every_request_ends_rightly_in_any_configuration(seed: int, depth: int, **options: object) -> None:
    simulate(seed, 20, depth, **options)


@pytest.mark.slow
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("variant", VARIANTS)
def test_many_more_requests_end_rightly(variant: str, depth: int) -> None:
    for seed in range(100, 112):
        simulate(seed, 150, depth, **VARIANTS[variant])
