"""Bodies of completions, and deltas from their chunks."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kllm.cluster.external.completion import ChunkReader, completion_body, ended_already
from kllm.cluster.external.errors import EngineFault, NoTokenIds
from kllm.messages import Submit
from kllm.request import InvalidRequest, Request, SamplingParams, StructuredOutputs, TokenLogprobs

PROMPT = [5, 6, 7]


def submit(*outputs: int, prefill_only: bool = False, salt: str = "", **params: Any) -> Submit:
    request = Request(
        request_id="r", prompt_token_ids=PROMPT, params=SamplingParams(**{"max_tokens": 8, **params}), cache_salt=salt
    )
    return Submit(request=request, outputs=list(outputs), attempt=3, prefill_only=prefill_only)


def body(given: Submit, *, absolute_draws: bool = False) -> dict[str, Any]:
    parsed: dict[str, Any] = json.loads(completion_body(given, "m", 100, absolute_draws=absolute_draws))
    return parsed


def chunk(**choice: Any) -> bytes:
    return json.dumps({"choices": [{"index": 0, "text": "", **choice}]}).encode()


def test_everything_that_decides_the_output_is_said() -> None:
    """Engines fill what is left out from the model's generation config, so defaults are sent too."""
    assert body(submit(temperature=0.5, seed=4)) == {
        "model": "m",
        "prompt": PROMPT,
        "max_tokens": 8,
        "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        "return_token_ids": True,
        "temperature": 0.5,
        "top_p": 1.0,
        "top_k": 0,
        "min_p": 0.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "repetition_penalty": 1.0,
        "seed": 4,
    }


def test_what_is_rare_is_sent_when_it_is_given() -> None:
    sent = body(
        submit(
            ignore_eos=True,
            min_tokens=2,
            stop_token_ids=(1, 2),
            logit_bias={3: 1.5},
            allowed_token_ids=(4,),
            bad_words=("no",),
            bad_words_token_ids=((9,),),
            logprobs=2,
            structured_outputs=StructuredOutputs(regex="a+"),
            salt="pepper",
        )
    )
    expected = {
        "ignore_eos": True,
        "min_tokens": 2,
        "stop_token_ids": [1, 2],
        "logit_bias": {"3": 1.5},
        "allowed_token_ids": [4],
        "bad_words": ["no"],
        "logprobs": 2,
        "return_tokens_as_token_ids": True,
        "structured_outputs": {"regex": "a+"},
        "cache_salt": "pepper",
    }
    assert {name: sent[name] for name in expected} == expected


def test_a_continuation() -> None:
    sent = body(submit(10, 11, min_tokens=3, seed=2**63 - 1))
    assert (sent["prompt"], sent["max_tokens"], sent["min_tokens"]) == ([5, 6, 7, 10, 11], 6, 1)
    assert sent["seed"] == -(2**63) + 1  # other draws than those of the first two tokens
    assert body(submit(10, 11, seed=7), absolute_draws=True)["seed"] == 7
    assert "min_tokens" not in body(submit(10, 11, min_tokens=2))
    assert body(submit(10, prefill_only=True))["max_tokens"] == 1
    assert body(submit(10, max_tokens=None))["max_tokens"] == 96  # the rest of the context


@pytest.mark.parametrize(
    ("given", "what"),
    [
        (submit(prompt_logprobs=1), "prompt_logprobs"),
        (submit(10, structured_outputs=StructuredOutputs(regex="a+")), "structured output"),
        (submit(bad_words_token_ids=((9,),)), "bad words"),
    ],
)
def test_what_cannot_be_expressed(given: Submit, what: str) -> None:
    with pytest.raises(InvalidRequest, match=what):
        body(given)


def test_an_end_that_was_lost() -> None:
    assert ended_already(submit(1, 2)) is None
    assert ended_already(submit()) is None
    end = ended_already(submit(*range(8)))
    assert end is not None
    assert (end.finish_reason, end.index, end.attempt) == ("length", 8, 3)
    end = ended_already(submit(1, 9, stop_token_ids=(9,)))
    assert end is not None
    assert (end.finish_reason, end.stop_reason) == ("stop", 9)
    assert ended_already(submit(1, 9, stop_token_ids=(9,), min_tokens=2)) is None


def test_chunks_become_deltas() -> None:
    reader = ChunkReader(submit(10, 11))
    usage = {"prompt_tokens": 5, "prompt_tokens_details": {"cached_tokens": 4}}
    first = reader.read(json.dumps({"choices": [{"token_ids": [1, 2], "text": "ab"}], "usage": usage}).encode())
    assert first is not None
    assert (first.request_id, first.attempt, first.index, first.token_ids) == ("r", 3, 2, [1, 2])
    assert first.num_cached_tokens == 4
    assert reader.read(chunk()) is None
    last = reader.read(chunk(token_ids=[3], finish_reason="stop", stop_reason="x"))
    assert last is not None
    assert (last.index, last.token_ids, last.finish_reason, last.stop_reason) == (4, [3], "stop", "x")
    assert reader.finished
    assert reader.read(chunk(token_ids=[9])) is None
    assert reader.next_index == 5


def test_a_prefill_does_not_end_the_request() -> None:
    reader = ChunkReader(submit(10, prefill_only=True))
    delta = reader.read(chunk(token_ids=[1], finish_reason="length"))
    assert delta is not None
    assert delta.finish_reason is None
    assert reader.finished
    for ending in (submit(prefill_only=True, max_tokens=1), submit(*range(7), prefill_only=True)):
        delta = ChunkReader(ending).read(chunk(token_ids=[1], finish_reason="length"))
        assert delta is not None
        assert delta.finish_reason == "length"
    delta = ChunkReader(submit(prefill_only=True)).read(chunk(token_ids=[1], finish_reason="stop"))
    assert delta is not None
    assert delta.finish_reason == "stop"


@pytest.mark.parametrize(
    "data",
    [
        b"nonsense",
        b"[]",
        b"[" * 100_000,
        b'{"choices": 1}',
        chunk(token_ids=[-1]),
        chunk(token_ids=[2**31]),
        chunk(token_ids="12"),
        chunk(token_ids=list(range(9))),  # of 8
        chunk(token_ids=[1], finish_reason="abort"),
        b'{"error": {"message": "out of memory", "code": 500}}',
        b'{"error": "out of memory"}',
    ],
)
def test_faults(data: bytes) -> None:
    with pytest.raises(EngineFault):
        ChunkReader(submit()).read(data)


def test_text_without_ids_is_of_no_use() -> None:
    with pytest.raises(NoTokenIds, match="return_token_ids"):
        ChunkReader(submit()).read(chunk(text="hello"))


def test_an_error_that_is_the_clients() -> None:
    with pytest.raises(InvalidRequest, match="no such token"):
        ChunkReader(submit()).read(b'{"error": {"message": "no such token", "code": 400}}')


def test_logprobs() -> None:
    given = {
        "tokens": ["token_id:1", "token_id:2"],
        "token_logprobs": [-0.5, -3.0],
        "top_logprobs": [
            {"token_id:1": -0.5, "token_id:4": -2.0},
            {"token_id:5": -0.1, "token_id:6": -0.2, "token_id:2": -3.0},
        ],
    }
    delta = ChunkReader(submit(logprobs=2)).read(chunk(token_ids=[1, 2], logprobs=given))
    assert delta is not None
    assert delta.logprobs == [
        TokenLogprobs(1, -0.5, 1, ((1, -0.5), (4, -2.0))),
        TokenLogprobs(2, -3.0, 3, ((5, -0.1), (6, -0.2))),
    ]


@pytest.mark.parametrize(
    "given",
    [
        None,
        {"tokens": ["token_id:1"], "token_logprobs": []},
        {"tokens": ["token_id:1"], "token_logprobs": [None]},
        {"tokens": ["token_id:1"], "token_logprobs": [-1.0], "top_logprobs": []},
        {"tokens": [" the"], "token_logprobs": [-1.0], "top_logprobs": [{" the": -1.0}]},
    ],
)
def test_logprobs_that_make_no_sense(given: Any) -> None:
    with pytest.raises(EngineFault):
        ChunkReader(submit(logprobs=1)).read(chunk(token_ids=[1], logprobs=given))
