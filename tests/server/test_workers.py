"""What is much work leaves the event loop, however it is spread: many short prompts, bad words, tools."""

from __future__ import annotations

import json
import threading
from typing import Any

import pytest
from support.api_server import ApiServer

from kllm.request import InvalidRequest
from kllm.server.protocol import ChatMessage, CompletionRequest, Tool
from kllm.server.sampling import checked_params
from kllm.server.service import PORTION_CHARS, Service, _plain
from kllm.server.workers import INLINE_CHARS
from kllm.tokenization.tokenizer import Tokenizer


@pytest.fixture
def service(server: ApiServer) -> Service:
    return server.app.state.service


class Threads:
    """The kind of thread of each call of a method, and what it was called with first."""

    def __init__(self, owner: object, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[tuple[bool, Any]] = []
        method = getattr(owner, name)

        def recorded(first: Any, *args: Any, **kwargs: Any) -> Any:
            self.calls.append((threading.current_thread().name.startswith("kllm-worker"), first))
            return method(first, *args, **kwargs)

        monkeypatch.setattr(owner, name, recorded)

    @property
    def in_workers(self) -> set[bool]:
        return {in_worker for in_worker, _ in self.calls}


@pytest.fixture
def encoding(server: ApiServer, monkeypatch: pytest.MonkeyPatch) -> Threads:
    return Threads(server.tokenizer, "encode", monkeypatch)


@pytest.fixture
def rendering(service: Service, monkeypatch: pytest.MonkeyPatch) -> Threads:
    return Threads(service.chat_template, "render", monkeypatch)


def ids(tokenizer: Tokenizer, texts: list[str]) -> list[list[int]]:
    return [tokenizer.encode(text) for text in texts]


@pytest.mark.parametrize("texts", [["the wind"] * 200, ["a" * (INLINE_CHARS - 1)] * 2, [""] * 1024])
def test_many_short_prompts_are_tokenised_in_a_thread(
    server: ApiServer, service: Service, encoding: Threads, texts: list[str]
) -> None:
    encoded = server.call(service.encode_prompts(texts, True))
    assert encoding.in_workers == {True}
    assert encoded == ids(server.tokenizer, texts)


def test_few_short_prompts_are_tokenised_inline(server: ApiServer, service: Service, encoding: Threads) -> None:
    server.call(service.encode_prompts(["a", "b"], True))
    server.call(service.encode("a" * (INLINE_CHARS // 2), True))
    assert encoding.in_workers == {False}


def test_prompts_of_both_kinds_keep_their_places(server: ApiServer, service: Service) -> None:
    a, b = ids(server.tokenizer, ["a", "b"])
    assert server.call(service.encode_prompts(["a", [7, 8], "b", []], True)) == [a, [7, 8], b, []]
    assert server.call(service.encode_prompts([], True)) == []


def test_a_large_batch_is_cut_into_portions(
    server: ApiServer, service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = [f"{number} " * 250 for number in range(1000, 1200)]
    portions = Threads(service, "_encode_each", monkeypatch)
    assert server.call(service.encode_prompts(texts, True)) == ids(server.tokenizer, texts)
    sizes = [sum(map(len, portion)) for _, portion in portions.calls]
    assert sum(sizes) == sum(map(len, texts))
    assert len(sizes) > 1
    assert max(sizes) < PORTION_CHARS + len(texts[0])


def test_a_prompt_that_is_too_long_is_refused_before_any_is_tokenised(
    server: ApiServer, service: Service, encoding: Threads
) -> None:
    with pytest.raises(InvalidRequest, match="more than fit"):
        server.call(service.encode_prompts(["a", "a" * 1_000_000], True))
    assert encoding.calls == []


def params(server: ApiServer, **fields: Any) -> Any:
    body = CompletionRequest.model_validate({"prompt": "a", **fields})
    workers = server.app.state.service.workers
    return server.call(checked_params(body, server.tokenizer, workers, max_tokens=1, logprobs=None))


@pytest.mark.parametrize("words", [["x" * 1000, "y" * 100], ["ab"] * 150])
def test_many_bad_words_are_tokenised_in_a_thread(server: ApiServer, encoding: Threads, words: list[str]) -> None:
    given = params(server, bad_words=words, temperature=0.5)
    assert encoding.in_workers == {True}
    expected = [text for word in words for text in (word, f" {word}")]
    assert set(given.bad_words_token_ids) == set(map(tuple, ids(server.tokenizer, expected)))
    assert (given.temperature, given.max_tokens) == (0.5, 1)


def test_few_bad_words_are_tokenised_inline(server: ApiServer, encoding: Threads) -> None:
    params(server, bad_words=["bad", "worse"])
    assert encoding.in_workers == {False}


def test_what_is_wrong_with_parameters_is_told(server: ApiServer) -> None:
    with pytest.raises(InvalidRequest, match="bad words are allowed"):
        params(server, bad_words=["bad"] * 600)
    with pytest.raises(InvalidRequest, match="not a token id"):
        params(server, logit_bias={f"x{number}": 1.0 for number in range(1000)})
    with pytest.raises(InvalidRequest):
        params(server, structured_outputs={"regex": "("})


def tool(name: str, description: str = "") -> Tool:
    parameters = {"type": "object", "default": None, "properties": {"x": {"type": "string"}}}
    function = {"name": name, "description": description, "parameters": parameters}
    return Tool.model_validate({"type": "function", "function": function})


def message(**fields: Any) -> ChatMessage:
    return ChatMessage.model_validate({"role": "user", "content": "hi", **fields})


def call(arguments: str) -> dict[str, Any]:
    return {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}


LARGE = {
    "many tools": ([message()], [tool(f"f{number}") for number in range(200)], {}),
    "a long description": ([message()], [tool("f", "long " * 500)], {}),
    "variables": ([message()], None, {"documents": [{"text": "a"}] * 1000}),
    "a name": ([message(name="n" * 3000)], None, {}),
    "arguments": ([message(role="assistant", tool_calls=[call(json.dumps({"x": "a" * 3000}))])], None, {}),
    "parts": ([message(content=[{"type": "text", "text": ""}] * 1000)], None, {}),
    "many messages": ([message(content="")] * 1000, None, {}),
}


@pytest.mark.parametrize("what", LARGE)
def test_a_chat_that_is_large_in_any_way_is_rendered_in_a_thread(
    server: ApiServer, service: Service, rendering: Threads, what: str
) -> None:
    messages, tools, variables = LARGE[what]
    server.call(service.render_chat(messages, tools, True, variables))
    assert rendering.in_workers == {True}
    server.call(service.render_chat([message()], [tool("f")], True, {}))
    assert [in_worker for in_worker, _ in rendering.calls] == [True, False]


def test_plain_values_are_those_of_model_dump() -> None:
    messages = [message(), message(role="assistant", content=None, tool_calls=[call("{}")]), *LARGE["parts"][0]]
    for model in [*messages, tool("f"), tool("f", "text")]:
        assert json.dumps(_plain(model)) == json.dumps(model.model_dump(exclude_none=True))
