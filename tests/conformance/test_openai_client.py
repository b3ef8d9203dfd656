"""OpenAI's own client against a running server with a real engine: what a program written for OpenAI relies on."""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from pydantic import BaseModel, Field
from support.live_server import HANG_S, LiveServer, wait_until

HI: Any = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "say something"}]
LONG: Any = {"model": "tiny", "prompt": "go on", "extra_body": {"ignore_eos": True}}


@pytest.fixture
def api(live_server: LiveServer) -> Iterator[openai.OpenAI]:
    with connect(live_server) as client:
        yield client


def connect(server: LiveServer) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key=server.api_key or "none", max_retries=0, timeout=HANG_S)


def test_models(api: openai.OpenAI) -> None:
    assert [model.id for model in api.models.list()] == ["tiny"]
    assert api.models.retrieve("tiny").object == "model"


def test_chat(api: openai.OpenAI) -> None:
    reply = api.chat.completions.create(model="tiny", messages=HI, max_completion_tokens=12, n=2, seed=1)
    assert isinstance(reply, ChatCompletion)
    assert reply.id.startswith("chatcmpl-")
    assert [choice.index for choice in reply.choices] == [0, 1]
    for choice in reply.choices:
        assert choice.message.role == "assistant"
        assert choice.message.content is not None
        assert choice.finish_reason in ("stop", "length")
    assert reply.usage is not None
    assert reply.usage.completion_tokens <= 24
    assert reply.usage.total_tokens == reply.usage.prompt_tokens + reply.usage.completion_tokens
    assert reply.usage.prompt_tokens_details is not None
    again = api.chat.completions.create(model="tiny", messages=HI, max_tokens=12, n=2, seed=1)
    assert [choice.message.content for choice in again.choices] == [choice.message.content for choice in reply.choices]


def test_chat_stream(api: openai.OpenAI) -> None:
    asked: Any = {"model": "tiny", "messages": HI, "max_completion_tokens": 20, "seed": 3, "n": 2}
    whole = api.chat.completions.create(**asked)
    chunks = list(api.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    assert all(isinstance(chunk, ChatCompletionChunk) for chunk in chunks)
    assert len({chunk.id for chunk in chunks}) == 1
    texts, roles, reasons = ["", ""], [0, 0], [None, None]
    for chunk in chunks[:-1]:
        assert chunk.usage is None
        [choice] = chunk.choices
        texts[choice.index] += choice.delta.content or ""
        roles[choice.index] += choice.delta.role == "assistant"
        reasons[choice.index] = choice.finish_reason or reasons[choice.index]
    assert roles == [1, 1]
    assert texts == [choice.message.content for choice in whole.choices]
    assert reasons == [choice.finish_reason for choice in whole.choices]
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert whole.usage is not None
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens


def test_chat_logprobs(api: openai.OpenAI) -> None:
    reply = api.chat.completions.create(
        model="tiny", messages=HI, max_completion_tokens=8, temperature=0, logprobs=True, top_logprobs=3
    )
    logprobs = reply.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content
    for entry in logprobs.content:
        assert len(entry.top_logprobs) == 3
        assert entry.logprob == entry.top_logprobs[0].logprob <= 0  # greedy takes the best
        assert entry.bytes
    text = b"".join(bytes(entry.bytes or ()) for entry in logprobs.content).decode(errors="replace")
    assert text.removesuffix("<|im_end|>") == reply.choices[0].message.content


def test_completion(api: openai.OpenAI) -> None:
    reply = api.completions.create(
        model="tiny", prompt=["one", "two"], max_tokens=6, n=2, logprobs=2, seed=5, echo=True
    )
    assert [choice.index for choice in reply.choices] == [0, 1, 2, 3]
    assert [choice.text[:3] for choice in reply.choices] == ["one", "one", "two", "two"]
    logprobs = reply.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.token_logprobs is not None
    assert logprobs.token_logprobs[0] is None
    assert all(value <= 0 for value in logprobs.token_logprobs[1:])
    asked: Any = {"model": "tiny", "prompt": "one", "max_tokens": 30, "seed": 6}
    whole = api.completions.create(**asked).choices[0].text
    assert "".join(chunk.choices[0].text for chunk in api.completions.create(**asked, stream=True)) == whole
    stop = whole[8:11]
    stopped = api.completions.create(**asked, stop=[stop]).choices[0]
    assert (stopped.text, stopped.finish_reason) == (whole[: whole.find(stop)], "stop")


def test_extra_body(api: openai.OpenAI) -> None:
    tokens = [5, 9, 11]
    reply = api.completions.create(
        model="tiny",
        prompt="a",
        max_tokens=9,
        extra_body={"allowed_token_ids": tokens, "return_token_ids": True, "min_tokens": 9, "top_k": 2},
    )
    assert set(reply.choices[0].token_ids) <= set(tokens)  # type: ignore[attr-defined]
    assert reply.usage is not None
    assert reply.usage.completion_tokens == 9


class Person(BaseModel):
    name: str = Field(max_length=8)
    age: int = Field(ge=0, le=150)
    tags: list[str] = Field(max_length=2)


def test_structured_output(api: openai.OpenAI) -> None:
    """Even a model of random weights keeps to the schema."""
    short = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}
    form: Any = {"type": "json_schema", "json_schema": {"name": "short", "schema": short, "strict": True}}
    reply = api.chat.completions.create(model="tiny", messages=HI, response_format=form)
    assert json.loads(reply.choices[0].message.content or "") in ({"a": 1}, {"a": 2})
    tags = {"type": "array", "items": {"type": "string", "maxLength": 4}, "maxItems": 2}
    bounded = {**Person.model_json_schema(), "properties": {**Person.model_json_schema()["properties"], "tags": tags}}
    form = {"type": "json_schema", "json_schema": {"name": "person", "schema": bounded}}
    with api.chat.completions.stream(model="tiny", messages=HI, response_format=form, seed=1) as stream:
        kinds = {event.type for event in stream}
        content = stream.get_final_completion().choices[0].message.content
    assert {"chunk", "content.delta", "content.done"} <= kinds
    Person.model_validate_json(content or "")
    whole = api.chat.completions.create(model="tiny", messages=HI, response_format=form, seed=1)
    assert whole.choices[0].message.content == content


def test_raw_and_streaming_responses(api: openai.OpenAI) -> None:
    raw = api.chat.completions.with_raw_response.create(
        model="tiny", messages=HI, max_completion_tokens=3, extra_headers={"X-Request-Id": "mine-1"}
    )
    assert raw.headers["x-request-id"] == "mine-1"
    assert raw.parse().choices
    with api.completions.with_streaming_response.create(
        model="tiny", prompt="a", max_tokens=5, stream=True
    ) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        lines = [line for line in response.iter_lines() if line]
    assert lines[-1] == "data: [DONE]"


def test_leaving_a_stream_early(live_server: LiveServer, api: openai.OpenAI) -> None:
    with api.completions.create(**LONG, max_tokens=2000, stream=True) as stream:
        next(iter(stream))
    live_server.wait_idle()


def test_async_client(live_server: LiveServer) -> None:
    async def ask() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{live_server.url}/v1", api_key="secret", max_retries=0) as api:

            async def one(seed: int) -> str:
                stream = await api.completions.create(model="tiny", prompt="a", max_tokens=12, seed=seed, stream=True)
                return "".join([chunk.choices[0].text async for chunk in stream])

            return await asyncio.gather(*(one(seed) for seed in range(8)))

    texts = asyncio.run(ask())
    with connect(live_server) as api:
        alone = [api.completions.create(model="tiny", prompt="a", max_tokens=12, seed=seed) for seed in range(8)]
    assert texts == [reply.choices[0].text for reply in alone]


def test_errors_of_the_request(api: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as bad:
        api.chat.completions.create(model="tiny", messages=HI, temperature=9)
    assert (bad.value.status_code, bad.value.param, bad.value.type) == (400, "temperature", "invalid_request_error")
    with pytest.raises(openai.BadRequestError) as long:
        api.completions.create(model="tiny", prompt="ab " * 3000)
    assert long.value.code == "context_length_exceeded"
    form: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "rainbow"}}}
    with pytest.raises(openai.BadRequestError, match="rainbow"):
        api.chat.completions.create(model="tiny", messages=HI, response_format=form, stream=True)
    with pytest.raises(openai.NotFoundError) as missing:
        api.chat.completions.create(model="gpt-9", messages=HI)
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.NotFoundError):
        api.embeddings.create(model="tiny", input="a")


def test_wrong_key(live_server: LiveServer) -> None:
    with (
        openai.OpenAI(base_url=f"{live_server.url}/v1", api_key="wrong", max_retries=0) as api,
        pytest.raises(openai.AuthenticationError) as refused,
    ):
        api.models.list()
    assert refused.value.code == "invalid_api_key"


def test_full_queue(live_server: LiveServer, api: openai.OpenAI) -> None:
    with api.completions.create(**LONG, max_tokens=300, n=24, stream=True) as stream:
        next(iter(stream))
        with pytest.raises(openai.RateLimitError) as refused:
            api.completions.create(model="tiny", prompt="a")
        assert int(refused.value.response.headers["retry-after"]) >= 1
    live_server.wait_idle()


def test_server_that_drains(live_model: Path) -> None:
    with (
        LiveServer(live_model, "--threads", "1", "--drain-timeout", "600", "--served-model-name", "tiny") as server,
        connect(server) as api,
        api.completions.create(**LONG, max_tokens=500, stream=True) as stream,
    ):
        next(iter(stream))
        server.process.send_signal(signal.SIGTERM)
        with server.client() as client:
            wait_until(lambda: client.get("/ready").status_code == 503, "the server drains")
        with pytest.raises(openai.InternalServerError) as refused:
            api.chat.completions.create(model="tiny", messages=HI)
        assert (refused.value.status_code, refused.value.code) == (503, "shutting_down")
        assert [chunk.choices[0].finish_reason for chunk in stream][-1] == "length"
