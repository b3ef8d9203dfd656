"""The sampler as the runner uses it: rows come, go and come back; batches mix everything."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kllm.engine.sampler.sampler import Sampler
from kllm.request import SamplingParams
from kllm.scheduling.plan import NewRow

V = 50
EOS = (7, 9)
GREEDY = SamplingParams(temperature=0.0)


def new_row(params: SamplingParams, prompt=(1, 2), outputs=(), row: int = 0, seed: int = 0) -> NewRow:
    return NewRow(row, f"r{row}", [*prompt, *outputs], len(prompt), 0, [], params, seed)


def random_logits(n: int, vocab_size: int = V, seed: int = 0) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).standard_normal((n, vocab_size)).astype(np.float32) * 3)


def mask_of(*tokens: int, vocab_size: int = V) -> bytes:
    bits = np.zeros(32 * -(-vocab_size // 32), np.uint8)
    bits[list(tokens)] = 1
    return np.packbits(bits, bitorder="little").tobytes()


def run(params: SamplingParams, logits: torch.Tensor, prompt=(1, 2), outputs=(), masks=None, seed: int = 0) -> list:
    """Sample row after row of `logits` as one request."""
    sampler = Sampler(V, 1, EOS)
    sampler.add(new_row(params, prompt, outputs, seed=seed))
    first = len(prompt) + len(outputs)
    return [sampler.sample(logits[i : i + 1].clone(), [0], [first + i], masks or {})[0] for i in range(logits.shape[0])]


def test_plain_greedy_is_argmax_with_the_lowest_id_among_equals():
    logits = random_logits(4)
    logits[2, [11, 30]] = 50.0
    sampler = Sampler(V, 4, EOS)
    for row in range(4):
        sampler.add(new_row(GREEDY, row=row))
    sampled = sampler.sample(logits.clone(), [2, 0, 3, 1], [2] * 4, {})
    assert [s.token for s in sampled] == logits.argmax(-1).tolist()
    assert sampled[2].token == 11
    assert all(s.error is None and s.logprobs is None for s in sampled)


def test_greedy_ignores_top_k_top_p_and_min_p():
    logits = random_logits(1)
    params = SamplingParams(temperature=1e-6, top_k=3, top_p=0.1, min_p=0.5, logit_bias={4: 100.0})
    assert run(params, logits)[0].token == 4


# -- what other rows do does not matter -------------------------------------------------------------------------

MIXED = [
    GREEDY,
    SamplingParams(),
    SamplingParams(temperature=0.0, logprobs=5),
    SamplingParams(temperature=0.8, top_k=7, logprobs=3),
    SamplingParams(temperature=1.2, top_p=0.7, logprobs=0),
    SamplingParams(min_p=0.1, top_k=30, top_p=0.9, logprobs=20),
    SamplingParams(repetition_penalty=1.3, frequency_penalty=0.5, presence_penalty=0.2, logprobs=1),
    SamplingParams(temperature=0.0, repetition_penalty=1.2),
    SamplingParams(logit_bias={3: 4.0, 8: -100.0}, allowed_token_ids=tuple(range(0, V, 2)), logprobs=2),
    SamplingParams(min_tokens=10, bad_words_token_ids=((4,), (1, 2, 3)), max_tokens=None),
]


@settings(max_examples=60, deadline=None)
@given(
    batch=st.lists(st.sampled_from(MIXED), min_size=1, max_size=12),
    numbers=st.integers(0, 2**32 - 1),
    vocab_size=st.sampled_from([V, 1003, 4099]),
    masked=st.booleans(),
    order=st.randoms(use_true_random=False),
)
def test_a_row_gets_the_same_bits_alone_and_in_any_batch(batch, numbers, vocab_size, masked, order):
    logits = random_logits(len(batch), vocab_size, numbers)
    logits[:, 20:30] = logits[:, 20:21]  # ties
    histories = [[i % 5, 7, (3 * i) % 11] for i in range(len(batch))]
    masks = {i: mask_of(*range(0, V, 3), vocab_size=vocab_size) for i in range(len(batch)) if masked and i % 2}

    def fresh(rows: list[int]) -> Sampler:
        sampler = Sampler(vocab_size, len(batch), EOS)
        for i in rows:
            sampler.add(new_row(batch[i], (5, 6), histories[i], row=i, seed=i + 1000))
        return sampler

    rows = list(range(len(batch)))
    order.shuffle(rows)
    together = fresh(rows).sample(logits[rows], rows, [5 + i for i in rows], masks)
    for row, sampled in zip(rows, together, strict=True):
        alone = fresh([row]).sample(logits[row : row + 1].clone(), [row], [5 + row], masks)[0]
        assert alone == sampled


def test_draws_depend_on_seed_and_position_only():
    logits = torch.zeros(40, V)
    tokens = [s.token for s in run(SamplingParams(), logits, seed=3)]
    assert tokens == [s.token for s in run(SamplingParams(), logits, seed=3)]
    assert tokens != [s.token for s in run(SamplingParams(), logits, seed=4)]
    # Continued after ten outputs, as by another instance.
    assert tokens[10:] == [s.token for s in run(SamplingParams(), logits[10:], outputs=tokens[:10], seed=3)]


# -- history -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("readded_at", range(1, 12))
def test_penalties_and_bad_words_survive_a_preemption(readded_at):
    params = SamplingParams(
        temperature=0.9,
        repetition_penalty=1.2,
        frequency_penalty=0.7,
        presence_penalty=0.3,
        bad_words_token_ids=((3, 4), (5, 3), (0, 1, 2), (6,)),
        min_tokens=8,
        max_tokens=12,
    )
    logits = random_logits(12, seed=8)
    logits[:, 8:] -= 6  # few likely tokens, so that words come up
    prompt = [1, 2, 2, 40]
    whole = [s.token for s in run(params, logits, prompt, seed=5)]

    sampler = Sampler(V, 2, EOS)
    sampler.add(new_row(params, prompt, seed=5))
    tokens: list[int] = []
    for i in range(12):
        if i == readded_at:  # the step in flight at the preemption is lost: its token was sampled but not committed
            sampler.sample(logits[i : i + 1].clone(), [0], [len(prompt) + i], {})
            sampler.remove(0)
            sampler.add(new_row(params, prompt, tokens, row=1, seed=5))
        row = 0 if i < readded_at else 1
        tokens.append(sampler.sample(logits[i : i + 1].clone(), [row], [len(prompt) + i], {})[0].token)
    assert tokens == whole


def test_frequency_counts_outputs_and_not_the_prompt():
    params = SamplingParams(temperature=0.0, frequency_penalty=1.0)
    logits = torch.zeros(5, V)
    logits[:, 1] = 2.5
    assert [s.token for s in run(params, logits, prompt=[1] * 9)] == [1, 1, 1, 0, 2]


def test_repetition_penalty_counts_the_prompt():
    logits = torch.zeros(1, V)
    logits[0, 1], logits[0, 3] = 2.0, 1.5
    assert run(SamplingParams(temperature=0.0, repetition_penalty=2.0), logits, prompt=[1])[0].token == 3
    logits = torch.full((1, V), -1.0)
    logits[0, 1] = -0.9
    assert run(SamplingParams(temperature=0.0, repetition_penalty=2.0), logits, prompt=[1])[0].token == 0


def test_a_tiny_repetition_penalty_does_not_overflow():
    params = SamplingParams(repetition_penalty=1e-38, logprobs=1)
    sampled = run(params, random_logits(3) + 100.0, prompt=range(V))
    assert all(s.error is None for s in sampled)


def test_bad_words_match_the_output_only():
    params = SamplingParams(temperature=0.0, bad_words_token_ids=((1, 2, 3), (5, 6)))
    logits = torch.zeros(1, V)
    logits[0, 3], logits[0, 4] = 2.0, 1.0
    assert run(params, logits, prompt=[1, 2])[0].token == 3
    assert run(params, logits, prompt=[1], outputs=[2])[0].token == 3
    assert run(params, logits, prompt=[0], outputs=[1, 2])[0].token == 4


@pytest.mark.parametrize(("ignore_eos", "expected"), [(False, [0, 0, 0, 7]), (True, [7, 7, 7, 7])])
def test_min_tokens_holds_off_the_ends(ignore_eos, expected):
    params = SamplingParams(temperature=0.0, min_tokens=3, stop_token_ids=(20,), ignore_eos=ignore_eos)
    logits = torch.zeros(4, V)
    logits[:, 7], logits[:, 9], logits[:, 20] = 3.0, 2.0, 4.0
    logits[3, 20] = 0.0
    assert [s.token for s in run(params, logits)] == expected


# -- logprobs ----------------------------------------------------------------------------------------------------


def test_logprobs_are_those_of_the_untouched_logits():
    logits = random_logits(1)
    order = logits[0].argsort(descending=True).tolist()
    params = SamplingParams(temperature=0.0, logprobs=3, logit_bias={order[0]: -100.0}, repetition_penalty=1.5)
    entry = run(params, logits, masks={0: mask_of(order[0], order[20])})[0].logprobs
    expected = torch.log_softmax(logits[0].double(), -1)
    # Biased down by 100, the best token still loses to the other one that the mask allows.
    assert entry.token_id == order[20]
    assert entry.rank == 21
    assert entry.logprob == pytest.approx(float(expected[order[20]]), abs=1e-5)
    assert [token for token, _ in entry.top] == order[:3]
    assert [value for _, value in entry.top] == pytest.approx(expected[order[:3]].tolist(), abs=1e-5)


def test_zero_logprobs_report_the_sampled_token_only():
    entry = run(SamplingParams(temperature=0.0, logprobs=0), random_logits(1))[0].logprobs
    assert entry.rank == 1
    assert entry.top == ()


# -- what should not happen --------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_nothing_allowed_ends_the_request(temperature):
    params = SamplingParams(temperature=temperature, min_tokens=5, allowed_token_ids=(3,), logprobs=2)
    sampled = run(params, random_logits(1), masks={0: mask_of(*EOS)})[0]
    assert sampled.token == EOS[0]
    assert sampled.error is None
    assert np.isfinite(sampled.logprobs.logprob)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_an_empty_grammar_mask_is_an_error(temperature):
    sampled = run(SamplingParams(temperature=temperature), random_logits(1), masks={0: mask_of()})[0]
    assert sampled.invalid, "a grammar is the client's: no fault of the instance"
    assert "grammar" in sampled.error


def test_nothing_allowed_without_an_end_token_is_an_error():
    sampler = Sampler(V, 1, ())
    sampler.add(new_row(SamplingParams(temperature=0.0, allowed_token_ids=(3,))))
    nothing = sampler.sample(random_logits(1), [0], [2], {0: mask_of(4)})[0]
    assert nothing.error
    assert nothing.invalid


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("params", [GREEDY, SamplingParams(top_p=0.9, logprobs=2)])
def test_non_finite_logits_concern_their_row_only(bad, params):
    logits = random_logits(3)
    expected = run(params, logits[2:])[0]
    logits[0, 13] = bad
    logits[1] = -torch.inf
    sampler = Sampler(V, 3, EOS)
    for row in range(3):
        sampler.add(new_row(params, row=row))
    sampled = sampler.sample(logits, [0, 1, 2], [2, 2, 2], {})
    assert "finite" in sampled[0].error
    assert "finite" in sampled[1].error
    assert sampled[2] == expected


def test_huge_logits_and_tiny_temperatures_stay_finite():
    logits = random_logits(1) * 1e37
    sampled = run(SamplingParams(temperature=0.001, logprobs=1), logits)[0]
    assert sampled.error is None
    assert sampled.token == int(logits.argmax())


def test_ids_outside_the_vocabulary_do_not_touch_the_next_row():
    odd = SamplingParams(
        temperature=0.0, logit_bias={V + 3: 100.0}, bad_words_token_ids=((V + 1,), (2, V + 2)), stop_token_ids=(V + 5,)
    )
    logits = random_logits(2)
    sampler = Sampler(V, 2, EOS)
    sampler.add(new_row(odd, row=0))
    sampler.add(new_row(GREEDY, row=1))
    assert [s.token for s in sampler.sample(logits.clone(), [0, 1], [2, 2], {})] == logits.argmax(-1).tolist()


def test_misuse_is_refused():
    sampler = Sampler(V, 2, EOS)
    sampler.add(new_row(GREEDY))
    with pytest.raises(ValueError, match="do not fit"):
        sampler.sample(random_logits(2), [0], [2], {})
    with pytest.raises(ValueError, match="mask"):
        sampler.sample(random_logits(1), [0], [2], {0: b"\xff"})
    with pytest.raises(KeyError, match="row 1"):
        sampler.sample(random_logits(1), [1], [2], {})
    assert sampler.sample(torch.empty(0, V), [], [], {}) == []
