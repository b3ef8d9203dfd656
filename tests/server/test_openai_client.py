"""The openai package against the server: what applications use."""

from __future__ import annotations

from collections.abc import Iterator

import openai
import pytest
from support.api_server import DEFAULT_ANSWER, ApiServer

HI = [{"role": "user", "content": "hi"}]


@pytest.fixture
def api(server: ApiServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_chat(api: openai.OpenAI) -> None:
    reply = api.chat.completions.create(model="tiny", messages=HI, logprobs=True, top_logprobs=2, n=2)  # type: ignore[arg-type]
    assert [choice.message.content for choice in reply.choices] == [DEFAULT_ANSWER] * 2
    assert reply.choices[0].logprobs is not None
    assert reply.choices[0].logprobs.content is not None
    assert len(reply.choices[0].logprobs.content[0].top_logprobs) == 2
    assert reply.usage is not None
    assert reply.usage.prompt_tokens_details is not None
    assert reply.usage.prompt_tokens_details.cached_tokens == 3


def test_chat_stream(api: openai.OpenAI) -> None:
    stream = api.chat.completions.create(
        model="tiny",
        messages=HI,
        stream=True,
        stream_options={"include_usage": True},
        user="u",  # type: ignore[arg-type]
    )
    chunks = list(stream)
    assert "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices) == DEFAULT_ANSWER
    assert chunks[-1].usage is not None


def test_chat_stream_helper(api: openai.OpenAI) -> None:
    with api.chat.completions.stream(model="tiny", messages=HI) as stream:  # type: ignore[arg-type]
        stream.until_done()
        assert stream.get_final_completion().choices[0].message.content == DEFAULT_ANSWER


def test_parsed_output(api: openai.OpenAI) -> None:
    from pydantic import BaseModel

    class Answer(BaseModel):
        a: int

    messages = [{"role": "user", "content": 'say:{"a": 1}'}]
    reply = api.chat.completions.parse(model="tiny", messages=messages, response_format=Answer)  # type: ignore[arg-type]
    assert reply.choices[0].message.parsed == Answer(a=1)


def test_completion(api: openai.OpenAI) -> None:
    reply = api.completions.create(model="tiny", prompt=["say:a", "say:b"], echo=True, logprobs=1)
    assert [choice.text for choice in reply.choices] == ["say:aa", "say:bb"]
    stream = api.completions.create(model="tiny", prompt="say:abc", stream=True)
    assert "".join(chunk.choices[0].text for chunk in stream) == "abc"


def test_extra_body(api: openai.OpenAI, server: ApiServer) -> None:
    api.completions.create(model="tiny", prompt="say:a", extra_body={"top_k": 5, "ignore_eos": True}, max_tokens=1)
    assert server.instance.submits[-1].params.top_k == 5


def test_models(api: openai.OpenAI) -> None:
    assert [model.id for model in api.models.list()] == ["tiny"]
    assert api.models.retrieve("tiny").owned_by == "kllm"


def test_error_classes(api: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        api.chat.completions.create(model="gpt-9", messages=HI)  # type: ignore[arg-type]
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as bad:
        api.chat.completions.create(model="tiny", messages=HI, temperature=9)  # type: ignore[arg-type]
    assert bad.value.param == "temperature"
    with pytest.raises(openai.InternalServerError):
        api.completions.create(model="tiny", prompt="say:fail")
    with pytest.raises(openai.APIError, match="had an error"):
        list(api.completions.create(model="tiny", prompt="say:fail", stream=True))


def test_authentication() -> None:
    with ApiServer(api_key=["right"]) as server:
        wrong = openai.OpenAI(base_url=f"{server.url}/v1", api_key="wrong", max_retries=0)
        with wrong, pytest.raises(openai.AuthenticationError):
            wrong.models.list()
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key="right") as right:
            assert right.models.list().data
