"""What every endpoint needs: the gateway, the tokenizer, limits, names; and the checks they share."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any

from pydantic import BaseModel

from kllm.cluster.gateway import Gateway
from kllm.cluster.routing_view import RoutingView, routing_view
from kllm.config import ServerConfig
from kllm.messages import Hello
from kllm.request import InvalidRequest
from kllm.server.errors import ApiError, unavailable
from kllm.server.logprobs import TokenTexts
from kllm.server.protocol import ChatMessage, Tool
from kllm.server.workers import CALL_CHARS, INLINE_CHARS, Workers
from kllm.telemetry.metrics import Metrics
from kllm.telemetry.routing_metrics import routing_metrics
from kllm.telemetry.slo_metrics import slo_metrics
from kllm.tokenization.chat_template import ChatTemplate
from kllm.tokenization.text_size import text_size
from kllm.tokenization.tokenizer import Tokenizer

PORTION_CHARS = 1 << 16  # of one request's prompts: a thread tokenises them in about 50 ms, then takes what waits
_RESERVED_VARIABLES = frozenset({"self", "messages", "tools"})


class Service:
    """One per server. `draining`: set once, when the server is told to stop; new requests are then refused.

    model_names: what clients may call the model; the first is reported. root: where the model came from.
    """

    def __init__(
        self,
        gateway: Gateway,
        tokenizer: Tokenizer,
        config: ServerConfig,
        model_names: Sequence[str],
        chat_template: ChatTemplate,
        root: str,
    ) -> None:
        self.gateway = gateway
        self.tokenizer = tokenizer
        self.config = config
        self.model_names = list(model_names)
        self.chat_template = chat_template
        self.root = root
        self.created = int(time.time())
        self.draining = False
        self.workers = Workers()
        self.texts = TokenTexts(tokenizer)
        self.metrics = Metrics(
            self.model_names[0], gateway, self._cache_config, self._chunk_tokens, config.vllm_metrics
        )
        self.metrics.add(lambda families: slo_metrics(families, gateway.slo_snapshot()))
        self.metrics.add(lambda families: routing_metrics(families, self.routing_view()))

    def routing_view(self) -> RoutingView:
        return routing_view(self.gateway.slots, self.gateway.directory, self.gateway.routing)

    def close(self) -> None:
        self.workers.close()

    def _cache_config(self) -> dict[str, str]:
        info = self.gateway.info
        if info is None:
            return {}
        return {"num_gpu_blocks": str(info.num_blocks), "block_size": str(info.block_tokens)}

    def _chunk_tokens(self) -> int:
        info = self.gateway.info
        return 0 if info is None else info.chunk_tokens

    @property
    def ready(self) -> bool:
        return self.gateway.ready and not self.draining

    def require_ready(self) -> Hello:
        """What the instance said of itself. Raises ApiError 503 while there is none or the server stops."""
        if self.draining:
            raise unavailable("The server is shutting down.", code="shutting_down")
        info = self.gateway.info
        if info is None:
            raise unavailable("The model is still loading.", code="not_ready")
        return info

    def require_model(self, name: str | None) -> str:
        """The name under which to answer. Raises ApiError 404 for a model that is not served."""
        if name is None or name in self.model_names:
            return name or self.model_names[0]
        raise ApiError(404, f"The model {name[:200]!r} does not exist.", param="model", code="model_not_found")

    async def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        """Raises InvalidRequest for text so long that no tokens of it could fit, without tokenising it."""
        [ids] = await self.encode_prompts([text], add_special_tokens)
        return ids

    async def encode_prompts(self, prompts: Sequence[str | list[int]], add_special_tokens: bool) -> list[list[int]]:
        """Token ids of every prompt; those that are token ids stay as they are. Many short texts are as much work as
        a long one: they go to the threads in portions, between which other requests have their turn."""
        texts = [prompt for prompt in prompts if isinstance(prompt, str)]
        for text in texts:
            self._check_length(text)
        encoded: list[list[int]] = []
        for size, portion in _portions(texts):
            encoded += await self.workers.run(size, self._encode_each, portion, add_special_tokens)
        in_order = iter(encoded)
        return [next(in_order) if isinstance(prompt, str) else prompt for prompt in prompts]

    def _encode_each(self, texts: list[str], add_special_tokens: bool) -> list[list[int]]:
        return [self.tokenizer.encode(text, add_special_tokens) for text in texts]

    def _check_length(self, text: str) -> None:
        info = self.gateway.info
        if info is not None and len(text) > info.max_model_len * self._longest_token:
            raise InvalidRequest(
                f"the prompt has {len(text)} characters, more than fit into the model's context of "
                f"{info.max_model_len} tokens",
                "prompt",
                "context_length_exceeded",
            )

    @cached_property
    def _longest_token(self) -> int:
        return max(len(token) for token in self.tokenizer.backend.get_vocab())

    async def render_chat(
        self,
        messages: Sequence[ChatMessage],
        tools: Sequence[Tool] | None,
        add_generation_prompt: bool,
        variables: dict[str, Any],
    ) -> str:
        """The prompt that the chat template makes of the messages. Raises InvalidRequest."""
        taken = _RESERVED_VARIABLES & variables.keys()
        if taken:
            raise InvalidRequest(f"chat_template_kwargs must not set {min(taken)}", "chat_template_kwargs")

        def render() -> str:
            return self.chat_template.render(
                _plain(messages),
                tools=_plain(tools) if tools else None,
                **{"add_generation_prompt": add_generation_prompt, **variables},
            )

        return await self.workers.run(text_size((messages, tools, variables), INLINE_CHARS), render)


def _portions(texts: Sequence[str]) -> Iterator[tuple[int, list[str]]]:
    """(size, texts), in order."""
    size, portion = 0, []
    for text in texts:
        size += len(text) + CALL_CHARS
        portion.append(text)
        if size >= PORTION_CHARS:
            yield size, portion
            size, portion = 0, []
    if portion:
        yield size, portion


def _plain(value: Any) -> Any:
    """What model_dump(exclude_none=True) gives, but without a copy of the JSON inside, for which it holds the GIL."""
    if isinstance(value, BaseModel):
        return {name: _plain(field) for name, field in vars(value).items() if field is not None}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return value
