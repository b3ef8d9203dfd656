from __future__ import annotations

import msgspec
import pytest
from support.scripted_instance import HELLO, VOCABULARY, make_request

from kllm.cluster.admission import CompletionRate, admit
from kllm.request import InvalidRequest, Request

SMALL_CACHE = msgspec.structs.replace(HELLO, num_blocks=4)  # 64 tokens of KV, 65 with the last one sampled


@pytest.mark.parametrize(
    ("request_", "param", "code", "message"),
    [
        (make_request(""), "request_id", None, "empty"),
        (Request(request_id="r", prompt_token_ids=[], params=make_request().params), "prompt", None, "at least one"),
        (make_request(prompt=[1] * 200), "prompt", "context_length_exceeded", "has 200 tokens"),
        (make_request(prompt=[1] * 5000, max_tokens=None), "prompt", "context_length_exceeded", "has 5000 tokens"),
        (make_request(prompt=[1, VOCABULARY]), "prompt", None, "token id 1000"),
        (make_request(prompt=[1, -1]), "prompt", None, "token id -1"),
        (make_request(max_tokens=198), "max_tokens", "context_length_exceeded", "201 were requested"),
        (make_request(max_tokens=2**31 - 1), "max_tokens", "context_length_exceeded", "2147483650 were requested"),
        (make_request(max_tokens=None, min_tokens=198), "min_tokens", None, "room for 158"),
        (make_request(temperature=3.0), "temperature", None, "between"),
        (make_request(stop_token_ids=(VOCABULARY,)), "stop_token_ids", None, "vocabulary"),
    ],
)
def test_what_could_never_run_is_refused(request_: Request, param: str, code: str | None, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message) as refusal:
        admit(request_, HELLO, 1)
    assert (refusal.value.param, refusal.value.code) == (param, code)


def test_what_exceeds_the_cache_is_refused_at_once() -> None:
    with pytest.raises(InvalidRequest, match="66 tokens need 5 KV blocks, but the cache has 4") as refusal:
        admit(make_request(max_tokens=63), SMALL_CACHE, 1)
    assert refusal.value.param == "max_tokens"
    assert admit(make_request(max_tokens=62), SMALL_CACHE, 1).params.max_tokens == 62
    with pytest.raises(InvalidRequest, match="the KV cache holds 64") as refusal:
        admit(make_request(prompt=[1] * 65), SMALL_CACHE, 1)
    assert refusal.value.param == "prompt"


def test_an_open_length_becomes_what_there_is_room_for() -> None:
    wide = msgspec.structs.replace(HELLO, num_blocks=100)
    assert admit(make_request(max_tokens=None), wide, 1).params.max_tokens == 197
    assert admit(make_request(max_tokens=None), SMALL_CACHE, 1).params.max_tokens == 62
    assert admit(make_request(prompt=[1] * 199, max_tokens=None), wide, 1).params.max_tokens == 1


def test_a_seed_is_given_only_where_none_is() -> None:
    assert admit(make_request(), HELLO, 7).params.seed == 7
    assert admit(make_request(seed=0), HELLO, 7).params.seed == 0


def test_completion_rate() -> None:
    rate = CompletionRate()
    assert rate.seconds_for(100, 0.0) == 1
    for second in range(200):
        rate.record(2.0 * second)
    assert rate.seconds_for(1, 400.0) == 2
    assert rate.seconds_for(10, 400.0) == 20
    assert rate.seconds_for(1000, 400.0) == 60
    assert rate.seconds_for(1, 10_000.0) == 60, "a stall shows"
