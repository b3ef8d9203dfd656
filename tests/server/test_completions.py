"""/v1/completions and /v1/chat/completions, whole and streamed, compared field by field and with their schemas."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from support.api_server import DEFAULT_ANSWER, ApiServer

from kllm.server.responses import (
    ChatCompletionChunk,
    ChatCompletionResponse,
    CompletionResponse,
)

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
EOS = "<|im_end|>"


def chat(client: httpx.Client, said: str = "say:abc", **more: Any) -> dict[str, Any]:
    response = client.post(CHAT, json={"model": "tiny", "messages": [{"role": "user", "content": said}], **more})
    assert response.status_code == 200, response.text
    ChatCompletionResponse.model_validate_json(response.text)
    return response.json()


def complete(client: httpx.Client, prompt: Any = "say:abc", **more: Any) -> dict[str, Any]:
    response = client.post(TEXT, json={"model": "tiny", "prompt": prompt, **more})
    assert response.status_code == 200, response.text
    CompletionResponse.model_validate_json(response.text)
    return response.json()


def events(client: httpx.Client, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """Chunks of a stream, which must end with [DONE]."""
    with client.stream("POST", path, json={"stream": True, **body}) as response:
        assert response.status_code == 200, response.read()
        assert response.headers["content-type"].startswith("text/event-stream")
        lines = [line for line in response.iter_lines() if line]
    assert all(line.startswith("data: ") for line in lines)
    assert lines[-1] == "data: [DONE]"
    chunks = [json.loads(line[6:]) for line in lines[:-1]]
    schema = ChatCompletionChunk if path == CHAT else CompletionResponse
    for chunk in chunks:
        if "error" not in chunk:
            schema.model_validate_json(json.dumps(chunk))
    return chunks


def chat_events(client: httpx.Client, said: str = "say:abc", **more: Any) -> list[dict[str, Any]]:
    return events(client, CHAT, {"messages": [{"role": "user", "content": said}], **more})


def text_events(client: httpx.Client, prompt: Any = "say:abc", **more: Any) -> list[dict[str, Any]]:
    return events(client, TEXT, {"prompt": prompt, **more})


def joined(chunks: list[dict[str, Any]], index: int = 0) -> str:
    choices = [choice for chunk in chunks for choice in chunk["choices"] if choice["index"] == index]
    return "".join(choice["text"] if "text" in choice else choice["delta"].get("content", "") for choice in choices)


def test_chat(client: httpx.Client, server: ApiServer) -> None:
    reply = chat(client, "hi")
    assert reply["id"].startswith("chatcmpl-")
    assert reply["model"] == "tiny"
    [choice] = reply["choices"]
    assert choice["message"] == {"role": "assistant", "content": DEFAULT_ANSWER, "refusal": None}
    assert (choice["finish_reason"], choice["stop_reason"], choice["logprobs"]) == ("stop", None, None)
    prompt = server.tokenizer.encode(f"<|im_start|>user\nhi{EOS}\n<|im_start|>assistant\n")
    assert server.instance.submits[-1].prompt_token_ids == prompt
    answer = len(server.tokenizer.encode(DEFAULT_ANSWER)) + 1
    assert reply["usage"] == {
        "prompt_tokens": len(prompt),
        "completion_tokens": answer,
        "total_tokens": len(prompt) + answer,
        "prompt_tokens_details": {"cached_tokens": 3},
    }


def test_every_sampling_field_reaches_the_instance(client: httpx.Client, server: ApiServer) -> None:
    fields = {
        "temperature": 0.5, "top_p": 0.9, "top_k": 7, "min_p": 0.1, "presence_penalty": 0.1, "frequency_penalty": 0.2,
        "repetition_penalty": 1.1, "seed": 3, "min_tokens": 1, "stop_token_ids": [5], "ignore_eos": True,
        "include_stop_str_in_output": True, "skip_special_tokens": False, "allowed_token_ids": [1, 2],
    }  # fmt: skip
    more = {"max_completion_tokens": 4, "max_tokens": 9, "priority": 2, "cache_salt": "s", "request_id": "mine"}
    reply = chat(client, **fields, **more, stop="x", logit_bias={"5": 1.5}, bad_words=["bad"])
    assert reply["id"] == "chatcmpl-mine"
    request = server.instance.submits[-1]
    for name, value in fields.items():
        given = getattr(request.params, name)
        assert (list(given) if isinstance(value, list) else given) == value
    assert request.params.max_tokens == 4
    assert request.params.stop == ("x",)
    assert request.params.logit_bias == {5: 1.5}
    spellings = tuple(tuple(server.tokenizer.encode(text)) for text in ("bad", " bad"))
    assert request.params.bad_words_token_ids == spellings
    assert (request.priority, request.cache_salt) == (2, "s")
    assert request.request_id.startswith("chatcmpl-mine-")


def test_harmless_fields_and_nulls_are_ignored(client: httpx.Client) -> None:
    harmless = {
        "user": "u", "metadata": {"a": "b"}, "store": False, "service_tier": "auto", "safety_identifier": "s",
        "prompt_cache_key": "k", "parallel_tool_calls": True, "verbosity": "low", "reasoning_effort": "low",
        "modalities": ["text"], "tool_choice": "none", "response_format": {"type": "text"}, "session_id": "s",
    }  # fmt: skip
    nulls = dict.fromkeys(("stop", "n", "temperature", "logit_bias", "tools", "logprobs", "max_tokens", "stream"))
    assert chat(client, **harmless, **nulls)["choices"][0]["message"]["content"] == "abc"


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"response_format": {"type": "json_object"}}, ("json_object", "")),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "object"}}}},
            ("json", '{"type":"object"}'),
        ),
        ({"structured_outputs": {"json": {"type": "object"}}}, ("json", '{"type":"object"}')),
        ({"structured_outputs": {"regex": "a+"}}, ("regex", "a+")),
        ({"structured_outputs": {"grammar": 'start: "a"'}}, ("grammar", 'start: "a"')),
        ({"structured_outputs": {"choice": ["a", "b"]}}, ("choice", '["a","b"]')),
        ({"structured_outputs": {"json_object": True}}, ("json_object", "")),
    ],
)
def test_structured_outputs(
    client: httpx.Client, server: ApiServer, given: dict[str, Any], expected: tuple[str, str]
) -> None:
    chat(client, **given)
    structured = server.instance.submits[-1].params.structured_outputs
    assert structured is not None
    assert structured.key() == expected


def test_tools_and_template_variables_are_given_to_the_template(client: httpx.Client) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    assert chat(client, tools=[tool], chat_template_kwargs={"thinking": False})["choices"][0]["finish_reason"] == "stop"
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    history = [
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": [{"type": "text", "text": "say:abc"}]},
    ]
    response = client.post(CHAT, json={"messages": history})
    assert response.json()["choices"][0]["message"]["content"] == "abc"


def test_chat_logprobs(client: httpx.Client) -> None:
    logprobs = chat(client, "say:é", logprobs=True, top_logprobs=3)["choices"][0]["logprobs"]["content"]
    assert [entry["bytes"] for entry in logprobs] == [[0xC3], [0xA9], list(EOS.encode())]
    assert [entry["logprob"] for entry in logprobs] == [-0.5] * 3
    assert [top["logprob"] for top in logprobs[0]["top_logprobs"]] == [-0.5, -1.5, -9999.0]
    assert chat(client, logprobs=True)["choices"][0]["logprobs"]["content"][0]["top_logprobs"] == []


def test_legacy_logprobs_and_echo(client: httpx.Client) -> None:
    [choice] = complete(client, "é say:ab", echo=True, logprobs=1)["choices"]
    assert choice["text"] == "é say:abab"
    logprobs = choice["logprobs"]
    assert logprobs["tokens"][-3:] == ["a", "b", EOS]
    assert logprobs["token_logprobs"][:2] == [None, -0.5]
    assert logprobs["top_logprobs"][0] is None
    assert logprobs["top_logprobs"][-1] == {EOS: -0.5}
    assert {len(column) for column in logprobs.values()} == {len(logprobs["tokens"])}
    assert logprobs["text_offset"][:3] == [0, 1, 2]


def test_echo_of_zero_tokens_scores_a_prompt(client: httpx.Client) -> None:
    reply = complete(client, "ab", echo=True, logprobs=0, max_tokens=0)
    [choice] = reply["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("ab", "length")
    assert choice["logprobs"]["token_logprobs"] == [None, -0.5]
    assert reply["usage"]["completion_tokens"] == 0


@pytest.mark.parametrize("prompt", ["say:", "say:\x00"])
def test_the_end_of_an_output_that_is_not_shown_is_none(client: httpx.Client, prompt: str) -> None:
    """The one token that is computed may be the end of the text, or a stop token."""
    every = list(range(280))
    for more in ({}, {"stop_token_ids": every}):
        [choice] = complete(client, prompt, echo=True, max_tokens=0, **more)["choices"]
        assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == (prompt, "length", None)
        chunks = text_events(client, prompt, echo=True, max_tokens=0, **more)
        assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None, "length"]


def test_the_default_length_is_no_wish(client: httpx.Client, server: ApiServer) -> None:
    """Near the context's end there is room for less; each prompt of a batch has its own."""
    complete(client, [[5] * 500, [5] * 10])
    assert [request.params.max_tokens for request in server.instance.submits[-2:]] == [12, 16]
    complete(client, [5] * 511)
    assert server.instance.submits[-1].params.max_tokens == 1


def test_an_answer_can_be_sent_back_as_clients_hold_it(client: httpx.Client) -> None:
    answer = {"role": "assistant", "content": "abc", "refusal": None, "annotations": None, "audio": None}
    messages = [{"role": "user", "content": "hi"}, {**answer, "function_call": None}, {"role": "user", "content": "so"}]
    for last in ({}, {"annotations": []}):
        response = client.post(CHAT, json={"model": "tiny", "messages": [*messages, {**answer, **last}]})
        assert response.status_code == 200, response.text


def test_echo_has_as_many_alternatives_as_either_field_asks_for(client: httpx.Client, server: ApiServer) -> None:
    for more in ({}, {"prompt_logprobs": 0}, {"prompt_logprobs": 1}):
        complete(client, "ab", echo=True, logprobs=2, **more)
        assert server.instance.submits[-1].params.prompt_logprobs == 2


def test_prompt_logprobs(client: httpx.Client) -> None:
    entries = complete(client, "ab", prompt_logprobs=2)["choices"][0]["prompt_logprobs"]
    assert entries[0] is None
    ids = client.post("/tokenize", json={"prompt": "ab"}).json()["tokens"]
    assert entries[1][str(ids[1])] == {"logprob": -0.5, "rank": 1, "decoded_token": "b"}
    assert len(entries[1]) == 2
    assert chat(client, prompt_logprobs=0)["prompt_logprobs"][0] is None


@pytest.mark.parametrize("kind", ["text", "ids"])
def test_several_prompts_and_outputs(client: httpx.Client, server: ApiServer, kind: str) -> None:
    texts = ["x say:one", "x say:two"]
    prompts = texts if kind == "text" else [server.tokenizer.encode(text) for text in texts]
    reply = complete(client, prompts, n=2, seed=5, echo=True)
    assert [choice["index"] for choice in reply["choices"]] == [0, 1, 2, 3]
    assert [choice["text"] for choice in reply["choices"]] == [
        "x say:oneone", "x say:oneone", "x say:twotwo", "x say:twotwo"
    ]  # fmt: skip
    assert reply["usage"]["prompt_tokens"] == sum(len(server.tokenizer.encode(text)) for text in texts)
    assert reply["usage"]["prompt_tokens_details"]["cached_tokens"] == 6
    first, second, third, fourth = server.instance.submits[-4:]
    assert [request.params.seed for request in (first, second, third, fourth)] == [5, 6, 5, 6]
    assert (second.leader, fourth.leader) == (first.request_id, third.request_id)
    assert (first.leader, third.leader) == (None, None)
    assert len({request.request_id for request in (first, second, third, fourth)}) == 4


def test_prompt_as_ids(client: httpx.Client, server: ApiServer) -> None:
    ids = server.tokenizer.encode("say:abc")
    reply = complete(client, ids, return_token_ids=True)
    [choice] = reply["choices"]
    assert choice["text"] == "abc"
    assert choice["prompt_token_ids"] == ids
    assert choice["token_ids"] == [*server.tokenizer.encode("abc"), *server.tokenizer.eos_token_ids]


def test_stop_string_cuts_and_stops_the_instance(client: httpx.Client, server: ApiServer) -> None:
    [choice] = complete(client, "say:forever", stop=["gain a", "xyz"], max_tokens=300)["choices"]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("a", "stop", "gain a")
    chunks = text_events(client, "say:forever", stop="gain a", max_tokens=300)
    assert joined(chunks) == "a"
    assert chunks[-1]["choices"][0]["stop_reason"] == "gain a"
    assert server.gateway.in_flight == 0


def test_length(client: httpx.Client) -> None:
    [choice] = complete(client, "say:abcdef", max_tokens=3)["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("abc", "length")
    assert complete(client, "say:" + "z" * 40)["usage"]["completion_tokens"] == 16


def test_chat_stream(client: httpx.Client) -> None:
    chunks = chat_events(client, "hi", stream_options={"include_usage": True})
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert joined(chunks) == DEFAULT_ANSWER
    assert all(chunk["usage"] is None for chunk in chunks[:-1])
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"] == chat(client, "hi")["usage"]
    assert chunks[-2]["choices"][0]["finish_reason"] == "stop"
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert not any("\ufffd" in json.dumps(chunk, ensure_ascii=False) for chunk in chunks)
    assert all("usage" not in chunk for chunk in chat_events(client, "hi"))


def test_continuous_usage(client: httpx.Client) -> None:
    chunks = text_events(client, stream_options={"continuous_usage_stats": True})
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts)
    assert counts[-1] == 4


def test_streamed_logprobs_and_ids_cover_every_token(client: httpx.Client, server: ApiServer) -> None:
    said = "say:a€b"
    whole = chat(client, said, logprobs=True, return_token_ids=True)
    chunks = chat_events(client, said, logprobs=True, return_token_ids=True)
    choices = [chunk["choices"][0] for chunk in chunks]
    assert [token for choice in choices for token in choice.get("token_ids", [])] == whole["choices"][0]["token_ids"]
    content = [entry for choice in choices if choice["logprobs"] for entry in choice["logprobs"]["content"]]
    assert content == whole["choices"][0]["logprobs"]["content"]
    assert chunks[0]["prompt_token_ids"] == whole["prompt_token_ids"] == server.instance.submits[-1].prompt_token_ids


def test_streamed_echo_equals_the_whole(client: httpx.Client) -> None:
    whole = complete(client, "x say:abc", echo=True, logprobs=1)["choices"][0]
    choices = [chunk["choices"][0] for chunk in text_events(client, "x say:abc", echo=True, logprobs=1)]
    assert "".join(choice["text"] for choice in choices) == whole["text"]
    for column, values in whole["logprobs"].items():
        assert [value for choice in choices for value in choice["logprobs"][column]] == values


def test_streamed_choices_are_interleaved_and_complete(client: httpx.Client) -> None:
    chunks = text_events(client, ["x say:one two three", "x say:four five six"], n=2, max_tokens=40)
    texts = [joined(chunks, index) for index in range(4)]
    assert texts == ["one two three"] * 2 + ["four five six"] * 2
    order = [chunk["choices"][0]["index"] for chunk in chunks]
    assert order != sorted(order)


def test_failure_while_streaming_is_an_event(client: httpx.Client) -> None:
    *chunks, failure = text_events(client, "say:fail")
    assert joined(chunks) == "fa"
    assert failure["error"]["code"] == "internal_error"
    assert "told to" not in failure["error"]["message"]


def test_failure_names_the_request(client: httpx.Client) -> None:
    response = client.post(TEXT, json={"prompt": "say:fail"}, headers={"X-Request-Id": "my-1"})
    assert response.status_code == 500
    assert response.json()["error"]["type"] == "server_error"
    assert "my-1" in response.json()["error"]["message"]
    assert response.headers["x-request-id"] == "my-1"


@pytest.mark.parametrize("stream", [False, True])
def test_refusal_by_the_instance_is_a_bad_request(client: httpx.Client, stream: bool) -> None:
    response = client.post(TEXT, json={"prompt": "say:refuse", "stream": stream})
    assert response.status_code == 400
    assert response.json()["error"]["message"] == "told to"


@pytest.mark.parametrize("stream", [False, True])
def test_instances_that_stay_too_busy_are_no_error_of_the_server(client: httpx.Client, stream: bool) -> None:
    response = client.post(TEXT, json={"prompt": "say:busy", "stream": stream})
    assert (response.status_code, response.headers["retry-after"]) == (503, "5")
    assert response.json()["error"]["message"] == "the model's instances take no more requests now"
