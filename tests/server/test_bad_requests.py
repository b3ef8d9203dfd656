"""Every malformed request gets a status and a message that says what is wrong and where: never a 500, never a hang."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest
from pydantic import ValidationError
from support.api_server import ApiServer

from kllm.server.protocol import ChatCompletionRequest, CompletionRequest

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
HI = [{"role": "user", "content": "hi"}]


@dataclass
class Case:
    name: str
    path: str
    body: Any  # bytes are sent as they are, everything else as JSON
    status: int
    says: str  # part of the message
    param: str | None = None
    code: str | None = None
    method: str = "POST"
    headers: dict[str, str] = field(default_factory=dict)


def chat(
    name: str, says: str, param: str | None = None, status: int = 400, code: str | None = None, **body: Any
) -> Case:
    return Case(f"chat: {name}", CHAT, {"model": "tiny", "messages": HI, **body}, status, says, param, code)


def text(
    name: str, says: str, param: str | None = None, status: int = 400, code: str | None = None, **body: Any
) -> Case:
    return Case(f"text: {name}", TEXT, {"model": "tiny", "prompt": "hi", **body}, status, says, param, code)


def raw(name: str, body: bytes, says: str, status: int = 400, **more: Any) -> Case:
    return Case(f"raw: {name}", TEXT, body, status, says, **more)


def schema(value: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": value}}


DEEP_SCHEMA: dict[str, Any] = {"type": "string"}
for _ in range(25):
    DEEP_SCHEMA = {"type": "array", "items": DEEP_SCHEMA}
    DEEP_SCHEMA = {"type": "object", "properties": {"a": DEEP_SCHEMA}}

CASES = [
    # Not JSON, or not an object.
    raw("empty body", b"", "it is empty"),
    raw("cut off", b'{"prompt": "hi"', "not valid JSON"),
    raw("trailing text", b'{"prompt": "hi"} x', "not valid JSON"),
    raw("single quotes", b"{'prompt': 'hi'}", "not valid JSON"),
    raw("NaN", b'{"prompt": "hi", "temperature": NaN}', "not valid JSON"),
    raw("Infinity", b'{"prompt": "hi", "temperature": Infinity}', "not valid JSON"),
    raw("a number beyond a double", b'{"prompt": "hi", "temperature": 1e999}', "not valid JSON"),
    raw("an integer of 5000 digits", b'{"prompt": "hi", "seed": ' + b"9" * 5000 + b"}", "not valid JSON"),
    raw("broken UTF-8", b'{"prompt": "\xff\xfe"}', "not valid"),
    raw("an encoded surrogate", b'{"prompt": "\xed\xa0\x80"}', "not valid"),
    raw("a lone surrogate escape", b'{"prompt": "\\ud800"}', "not valid JSON"),
    raw("UTF-16", '{"prompt": "hi"}'.encode("utf-16"), "not valid"),
    raw("a byte order mark", b'\xef\xbb\xbf{"prompt": "hi"}', "not valid JSON"),
    raw("an array", b'["hi"]', "must be a JSON object"),
    raw("a string", b'"hi"', "must be a JSON object"),
    raw("null", b"null", "must be a JSON object"),
    raw("deep nesting", b'{"prompt": ' + b"[" * 200 + b"]" * 200 + b"}", "nested at most"),
    raw("very deep nesting", b"[" * 100_000, "nested at most"),
    raw("very deep and closed", b"[" * 100_000 + b"]" * 100_000, "nested at most"),
    raw("too large", b'{"prompt": "' + b"a" * 300_000 + b'"}', "larger than", 413, code="request_too_large"),
    raw("a form", b"prompt=hi", "content type", 415, headers={"content-type": "application/x-www-form-urlencoded"}),
    raw("a file", b"x", "content type", 415, headers={"content-type": "multipart/form-data; boundary=x"}),
    # Paths, methods and models.
    Case("unknown path", "/v1/nothing", {}, 404, "Unknown path"),
    Case("wrong method", TEXT, {}, 405, "not allowed", method="GET"),
    Case("wrong method for models", "/v1/models", {}, 405, "not allowed", method="DELETE"),
    Case("unknown model card", "/v1/models/gpt-9", {}, 404, "does not exist", "model", "model_not_found", method="GET"),
    chat("unknown model", "does not exist", "model", 404, "model_not_found", model="gpt-9"),
    text("unknown model", "does not exist", "model", 404, "model_not_found", model="gpt-9"),
    text("model is a number", "valid string", "model", model=5),
    # Messages.
    Case("no messages", CHAT, {"model": "tiny"}, 400, "Missing required parameter: messages", "messages"),
    chat("no message in messages", "at least 1 item", "messages", messages=[]),
    chat("messages is a string", "valid list", "messages", messages="hi"),
    chat("a message is a string", "valid dictionary", "messages[0]", messages=["hi"]),
    chat("no role", "Missing required parameter", "messages[0].role", messages=[{"content": "hi"}]),
    chat("unknown role", "'system'", "messages[1].role", messages=[*HI, {"role": "robot", "content": "hi"}]),
    chat("content is a number", "valid string", "messages[0].content", messages=[{"role": "user", "content": 5}]),
    chat(
        "an image", "'text'", "messages[0].content[0].type",
        messages=[{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
    ),
    chat("unknown field in a message", "Unrecognized", "messages[0].mood", messages=[{**HI[0], "mood": "good"}]),
    chat("lots of unknown fields", "Unrecognized request argument: a", "a", a=1, b=2, c=3),
    # Fields that would change the meaning if they were ignored.
    chat("required tool choice", "'none' or 'auto'", "tool_choice", tool_choice="required"),
    chat("functions", "Unrecognized", "functions", functions=[]),
    chat("audio", "Unrecognized", "audio", audio={"voice": "x"}),
    chat("audio out", "'text'", "modalities[1]", modalities=["text", "audio"]),
    chat("echo", "Unrecognized", "echo", echo=True),
    chat("top_logprobs alone", "needs logprobs", "top_logprobs", top_logprobs=2),
    chat("template variable", "must not set messages", "chat_template_kwargs", chat_template_kwargs={"messages": 1}),
    text("best_of", "only as much as n", "best_of", best_of=3),
    text("suffix", "input should be ''", "suffix", suffix="x"),
    text("messages", "Unrecognized", "messages", messages=HI),
    # Prompts.
    Case("no prompt", TEXT, {"model": "tiny"}, 400, "Missing required parameter: prompt", "prompt"),
    text("empty prompt", "at least one token", "prompt", prompt=""),
    text("no prompts", "must not be empty", "prompt", prompt=[]),
    text("one of the prompts is empty", "at least one token", "prompt", prompt=["a", ""]),
    text("no ids", "at least one token", "prompt", prompt=[[]]),
    text("prompt is an object", "valid string", "prompt", prompt={}),
    text("mixed prompts", "valid", "prompt[0]", prompt=["a", 1]),
    text("negative id", "greater than or equal to 0", "prompt[0]", prompt=[-1]),
    text("id beyond the vocabulary", "outside the vocabulary", "prompt", prompt=[288]),
    text("huge id", "less than", "prompt[0]", prompt=[10**30]),
    text("boolean ids", "valid integer", "prompt[0]", prompt=[True]),
    text("too long for the model", "context of 512", "prompt", code="context_length_exceeded", prompt="a b" * 400),
    text("far too long", "9000 characters", "prompt", code="context_length_exceeded", prompt="a b" * 3000),
    text("too many prompts", "at most 1024", "prompt", prompt=["a"] * 1025),
    text("too many outputs", "at most 1024", "n", prompt=["a"] * 20, n=100),
    # Numbers.
    text("n is zero", "greater than or equal to 1", "n", n=0),
    text("n is negative", "greater than or equal to 1", "n", n=-3),
    text("n is huge", "less than or equal to 128", "n", n=10**20),
    text("n is text", "valid integer", "n", n="2"),
    text("n is true", "valid integer", "n", n=True),
    text("n is a fraction", "valid integer", "n", n=1.5),
    text("max_tokens is zero", "at least 1", "max_tokens", max_tokens=0),
    text("max_tokens is negative", "greater than or equal to 0", "max_tokens", max_tokens=-1),
    text("max_tokens is huge", "less than", "max_tokens", max_tokens=2**63),
    text("more than the context", "512", "max_tokens", code="context_length_exceeded", max_tokens=511),
    chat("no output", "greater than or equal to 1", "max_completion_tokens", max_completion_tokens=0),
    text("min_tokens above max_tokens", "must not exceed", "min_tokens", min_tokens=9, max_tokens=3),
    text("negative temperature", "greater than or equal to 0", "temperature", temperature=-0.1),
    text("hot", "less than or equal to 2", "temperature", temperature=2.1),
    text("temperature is text", "valid number", "temperature", temperature="1"),
    text("top_p is zero", "greater than 0", "top_p", top_p=0),
    text("top_p above one", "less than or equal to 1", "top_p", top_p=1.01),
    text("top_k below -1", "greater than or equal to -1", "top_k", top_k=-2),
    text("min_p above one", "less than or equal to 1", "min_p", min_p=2),
    text("presence_penalty", "less than or equal to 2", "presence_penalty", presence_penalty=3),
    text("frequency_penalty", "greater than or equal to -2", "frequency_penalty", frequency_penalty=-2.5),
    text("repetition_penalty", "greater than 0", "repetition_penalty", repetition_penalty=0),
    text("seed beyond 64 bits", "less than", "seed", seed=2**64),
    text("priority beyond 32 bits", "less than", "priority", priority=2**40),
    text("logprobs above the limit", "less than or equal to 20", "logprobs", logprobs=21),
    text("logprobs is true", "valid integer", "logprobs", logprobs=True),
    chat("logprobs is a number", "valid boolean", "logprobs", logprobs=3),
    chat("top_logprobs above the limit", "less than or equal to 20", "top_logprobs", logprobs=True, top_logprobs=21),
    # Lists and maps.
    text("an empty stop string", "1 to 1024 characters", "stop", stop=""),
    text("an empty stop string among others", "1 to 1024 characters", "stop", stop=["a", ""]),
    text("too many stop strings", "at most 16", "stop", stop=["x"] * 17),
    text("a long stop string", "1 to 1024 characters", "stop", stop="x" * 1025),
    text("stop is a number", "valid string", "stop", stop=3),
    text("stop id beyond the vocabulary", "outside the vocabulary", "stop_token_ids", stop_token_ids=[999]),
    text("bias key", "is not a token id", "logit_bias", logit_bias={"hello": 1}),
    text("bias beyond the vocabulary", "outside the vocabulary", "logit_bias", logit_bias={"300": 1}),
    text("bias too strong", "between -100 and 100", "logit_bias", logit_bias={"3": 101}),
    text("many biases", "at most 1024 tokens", "logit_bias", logit_bias=dict.fromkeys(map(str, range(9999)), 1)),
    chat("many unknown fields", "at most 10000 members", **dict.fromkeys(map(str, range(10**4)), 0)),
    text("bias is a list", "valid dictionary", "logit_bias", logit_bias=[1]),
    text("nothing allowed", "must not be empty", "allowed_token_ids", allowed_token_ids=[]),
    text("an empty bad word", "1 to 1024 characters", "bad_words", bad_words=[""]),
    text("too many bad words", "at most 512", "bad_words", bad_words=["x"] * 513),
    text("request_id with blanks", "match pattern", "request_id", request_id="a b"),
    # Streaming.
    text("stream is text", "valid boolean", "stream", stream="yes"),
    text("stream_options without stream", "needs stream", "stream_options", stream_options={"include_usage": True}),
    text("unknown stream option", "Unrecognized", "stream_options.x", stream=True, stream_options={"x": 1}),
    text("streamed prompt_logprobs", "cannot be streamed", "prompt_logprobs", stream=True, prompt_logprobs=1),
    # Structured output.
    chat("unknown response format", "'json_object'", "response_format.type", response_format={"type": "xml"}),
    chat("no type", "Missing", "response_format.type", response_format={}),
    chat("no schema", "json_schema", "response_format.json_schema", response_format={"type": "json_schema"}),
    chat("text as schema", "valid dictionary", "response_format.json_schema.schema", response_format=schema("x")),
    chat("an impossible schema type", "rainbow", "response_format", response_format=schema({"type": "rainbow"})),
    chat("a deep schema", "64 deep", "response_format", response_format=schema(DEEP_SCHEMA)),
    text("a broken regex", "unclosed group", "structured_outputs", structured_outputs={"regex": "(a"}),
    text("a broken grammar", "cannot be used", "structured_outputs", structured_outputs={"grammar": "start: ((("}),
    text("two kinds", "exactly one", "structured_outputs", structured_outputs={"regex": "a", "choice": ["b"]}),
    text("no kind", "exactly one", "structured_outputs", structured_outputs={}),
    text("no choices", "at least 1 item", "structured_outputs.choice", structured_outputs={"choice": []}),
    text(
        "two ways", "exclude each other", "structured_outputs",
        structured_outputs={"regex": "a"}, response_format={"type": "json_object"},
    ),
    # Tokens.
    Case("tokenize nothing", "/tokenize", {}, 400, "either prompt or messages", "prompt"),
    Case("tokenize both", "/tokenize", {"prompt": "a", "messages": HI}, 400, "either prompt or messages", "prompt"),
    Case("detokenize unknown ids", "/detokenize", {"tokens": [288]}, 400, "below 288", "tokens"),
    Case("detokenize negative ids", "/detokenize", {"tokens": [-1]}, 400, "greater than or equal to 0", "tokens[0]"),
    Case("detokenize text", "/detokenize", {"tokens": "a"}, 400, "valid list", "tokens"),
]  # fmt: skip


@pytest.fixture(scope="module")
def small() -> Any:
    with ApiServer(max_body_bytes=250_000) as running, running.client() as http:
        yield http


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_malformed_request(case: Case, small: httpx.Client) -> None:
    content = case.body if isinstance(case.body, bytes) else json.dumps(case.body).encode()
    headers = {"content-type": "application/json"} | case.headers
    response = small.request(case.method, case.path, content=content, headers=headers)
    assert response.status_code == case.status, response.text
    assert response.headers["content-type"] == "application/json"
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert case.says in error["message"]
    assert (error["param"], error["code"]) == (case.param, case.code)
    assert error["type"] == "invalid_request_error"
    assert "Traceback" not in response.text
    assert response.headers["x-request-id"]


def test_body_that_is_too_large_is_refused_while_it_comes(small: httpx.Client) -> None:
    """Without a Content-Length the limit holds too, and the rest is not waited for."""
    sent = 0

    def endless() -> Any:
        nonlocal sent
        yield b'{"prompt": "'
        while sent < 100:
            sent += 1
            yield b"a" * 65536

    try:
        response = small.post(TEXT, content=endless(), headers={"content-type": "application/json"})
    except httpx.WriteError:
        pass  # cut off while still sending
    else:
        assert response.status_code == 413
    assert small.get("/health").status_code == 200


def test_repeated_keys_the_last_counts(small: httpx.Client) -> None:
    body = b'{"prompt": "say:a", "prompt": "say:b", "max_tokens": 1}'
    response = small.post(TEXT, content=body, headers={"content-type": "application/json"})
    assert response.json()["choices"][0]["text"] == "b"


def test_nothing_is_left_running(small: httpx.Client) -> None:
    assert small.get("/load").json()["server_load"] == 0


@pytest.mark.parametrize(
    "wrong",
    [
        {"prompt": [1.5] * 10**5},
        {"prompt": [[1.5] * 10] * 10**4},
        {"prompt": "a", "stop": [1] * 10**5},
        {"prompt": "a", "allowed_token_ids": ["x"] * 10**5},
        {"prompt": "a", "logit_bias": dict.fromkeys(map(str, range(9999)), "x")},
        {"prompt": "a", "structured_outputs": {"choice": [1] * 1000}},
    ],
    ids=lambda wrong: next(reversed(wrong)),
)
def test_many_faults_are_not_all_described(wrong: dict[str, Any]) -> None:
    """Each description takes microseconds and a kilobyte: a small body must not cost seconds and gigabytes."""
    with pytest.raises(ValidationError) as caught:
        CompletionRequest.model_validate(wrong)
    assert caught.value.error_count() <= 4


def test_of_many_messages_the_first_wrong_one_is_told() -> None:
    with pytest.raises(ValidationError) as caught:
        ChatCompletionRequest.model_validate({"messages": [*HI, *[1] * 10**5]})
    assert [error["loc"] for error in caught.value.errors()] == [("messages", 1)]
