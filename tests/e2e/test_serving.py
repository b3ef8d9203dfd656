"""What a client gets from a running server: a real instance behind a real socket."""

from __future__ import annotations

import json
import re
import string
from dataclasses import replace
from typing import Any

import httpx
import pytest
from support.live_server import CHAT, TEXT, LiveServer, Output, wait_until

WORDS = "the rain in the hills ran on and on over the land and then into the sea"
MESSAGES = [{"role": "system", "content": "be brief"}, {"role": "user", "content": WORDS}]
COMMON = {"ignore_eos": True, "return_token_ids": True}


@pytest.fixture
def client(live_server: LiveServer) -> Any:
    with live_server.client() as http:
        yield http


def test_says_that_it_is_ready_in_one_line(live_server: LiveServer, client: httpx.Client) -> None:
    assert re.fullmatch(r"kLLM is ready: http://127\.0\.0\.1:\d+ serves tiny, in .+\n", live_server.ready_line)
    assert client.get("/ready").json() == {"status": "ready"}
    assert [card["id"] for card in client.get("/v1/models").json()["data"]] == ["tiny"]
    assert client.get("/v1/models/tiny").json()["max_model_len"] == 4096


@pytest.mark.parametrize("sampling", [{"temperature": 0}, {"temperature": 1, "seed": 7}], ids=["greedy", "seeded"])
@pytest.mark.parametrize(
    ("path", "prompt"),
    [(TEXT, {"prompt": WORDS, "logprobs": 2}), (CHAT, {"messages": MESSAGES, "logprobs": True, "top_logprobs": 2})],
    ids=["text", "chat"],
)
def test_stream_and_whole_reply_say_the_same(
    live_server: LiveServer, client: httpx.Client, path: str, prompt: dict[str, Any], sampling: dict[str, Any]
) -> None:
    body = {**prompt, **sampling, **COMMON, "max_tokens": 60}
    reply = client.post(path, json=body).json()
    whole = Output()
    [choice] = reply["choices"]
    whole.add(choice)
    streamed = live_server.complete(body, path)
    assert replace(streamed, usage=None) == whole
    assert (len(whole.token_ids), len(whole.logprobs), whole.finish_reason) == (60, 60, "length")
    assert streamed.usage is not None
    for usage in (streamed.usage, reply["usage"]):
        assert usage["completion_tokens"] == 60
        assert usage["total_tokens"] == usage["prompt_tokens"] + 60


def test_tokens_arrive_while_others_are_still_computed(live_server: LiveServer, client: httpx.Client) -> None:
    with live_server.stream(TEXT, {"prompt": "a", "max_tokens": 500, **COMMON}) as reader:
        reader.read_tokens(1)
        assert client.get("/load").json()["server_load"] == 1
        assert len(reader.outputs[0].token_ids) < 250
        reader.read_all()
    assert len(reader.outputs[0].token_ids) == 500
    assert reader.chunks > 20  # one a token, but what a busy server is late with is sent together


def test_outputs_of_one_prompt_share_its_blocks(live_server: LiveServer, client: httpx.Client) -> None:
    prompt = "shared by four: " + WORDS * 3
    body = {"prompt": prompt, "max_tokens": 8, "seed": 11, "temperature": 1.0, **COMMON}
    length = len(client.post("/tokenize", json={"prompt": prompt}).json()["tokens"])
    live_server.wait_idle()
    before = live_server.metrics()
    reply = client.post(TEXT, json={**body, "n": 4}).json()
    assert reply["usage"]["prompt_tokens"] == length
    assert reply["usage"]["completion_tokens"] == 32
    shared = (length - 1) // 16 * 16
    wait_until(
        lambda: (
            live_server.metrics()["kllm:prefix_cache_hits_total"] == before["kllm:prefix_cache_hits_total"] + 3 * shared
        ),
        "three followers find the leader's prompt",
    )
    outputs = [choice["token_ids"] for choice in sorted(reply["choices"], key=lambda choice: choice["index"])]
    alone = [client.post(TEXT, json={**body, "seed": 11 + i}).json()["choices"][0]["token_ids"] for i in range(4)]
    assert outputs == alone
    assert len({tuple(ids) for ids in outputs}) == 4


def test_repeated_prompt_comes_from_the_cache(client: httpx.Client) -> None:
    body = {"prompt": "told twice: " + WORDS * 2, "max_tokens": 4, "temperature": 0}
    first, second = (client.post(TEXT, json=body).json() for _ in range(2))
    assert first["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    cached = second["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert cached == (second["usage"]["prompt_tokens"] - 1) // 16 * 16
    assert second["choices"][0]["text"] == first["choices"][0]["text"]
    salted = client.post(TEXT, json={**body, "cache_salt": "another tenant"}).json()
    assert salted["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


def test_stop_strings_that_span_tokens(live_server: LiveServer, client: httpx.Client) -> None:
    letters = client.post("/tokenize", json={"prompt": " ".join(string.ascii_lowercase)}).json()["tokens"]
    body = {"prompt": "x", "max_tokens": 80, "seed": 3, "allowed_token_ids": sorted(set(letters)), **COMMON}
    whole = live_server.complete(body).text
    stop = whole[40:45]
    end = whole.find(stop)
    stopped = live_server.complete({**body, "stop": [stop, "not in it"]})
    assert (stopped.text, stopped.finish_reason, stopped.stop_reason) == (whole[:end], "stop", stop)
    kept = client.post(TEXT, json={**body, "stop": stop, "include_stop_str_in_output": True}).json()["choices"][0]
    assert (kept["text"], kept["finish_reason"]) == (whole[: end + 5], "stop")


def test_structured_output(client: httpx.Client) -> None:
    schema = {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 8}, "ages": {"type": "array", "maxItems": 3,
                       "items": {"type": "integer", "minimum": 0, "maximum": 99}}, "ok": {"type": "boolean"}},
        "required": ["name", "ages", "ok"],
        "additionalProperties": False,
    }  # fmt: skip
    form = {"type": "json_schema", "json_schema": {"name": "person", "schema": schema}}
    reply = client.post(
        CHAT, json={"messages": MESSAGES, "response_format": form, "max_tokens": 400, "n": 3, "seed": 1}
    )
    for choice in reply.json()["choices"]:
        assert choice["finish_reason"] == "stop"
        person = json.loads(choice["message"]["content"])
        assert set(person) == {"name", "ages", "ok"}
    pattern = r"[a-f]{3}-[0-9]{4}"
    reply = client.post(TEXT, json={"prompt": "id: ", "structured_outputs": {"regex": pattern}, "max_tokens": 40})
    assert re.fullmatch(pattern, reply.json()["choices"][0]["text"])
    choices = ["sunny", "rain with thunder"]
    reply = client.post(TEXT, json={"prompt": "it is ", "structured_outputs": {"choice": choices}, "max_tokens": 40})
    assert reply.json()["choices"][0]["text"] in choices


METRICS = [
    "num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "prefix_cache_queries_total",
    "prefix_cache_hits_total", "num_preemptions_total", "prompt_tokens_total", "generation_tokens_total",
    "request_success_total", "time_to_first_token_seconds_bucket", "inter_token_latency_seconds_bucket",
    "request_time_per_output_token_seconds_bucket", "e2e_request_latency_seconds_bucket",
    "request_queue_time_seconds_bucket", "request_prefill_time_seconds_bucket",
    "request_decode_time_seconds_bucket", "request_prompt_tokens_bucket", "request_generation_tokens_bucket",
    "cache_config_info",
    "num_requests_blocked", "num_prefill_yields_total", "num_overtakes_total", "request_wait_seconds_bucket",
]  # fmt: skip


def test_metrics(live_server: LiveServer, client: httpx.Client) -> None:
    before = live_server.metrics()
    assert {f"kllm:{name}" for name in METRICS} <= before.keys()
    client.post(TEXT, json={"prompt": "count me", "max_tokens": 9, "ignore_eos": True})
    after = live_server.metrics()
    assert after["kllm:generation_tokens_total"] == before["kllm:generation_tokens_total"] + 9
    assert after["kllm:request_success_total:length"] == before["kllm:request_success_total:length"] + 1
    assert after["kllm:request_queue_time_seconds_count"] == before["kllm:request_queue_time_seconds_count"] + 1
