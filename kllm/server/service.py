"""What every endpoint needs: the gateway, the tokenizer, limits, names; and the checks they share."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import cached_property
from typing import Any

from kllm.cluster.gateway import Gateway
from kllm.cluster.routing_view import RoutingView, routing_view
from kllm.config import ServerConfig
from kllm.messages import Hello
from kllm.request import InvalidRequest
from kllm.server.errors import ApiError, unavailable
from kllm.server.logprobs import TokenTexts
from kllm.server.protocol import ChatMessage, Tool
from kllm.server.workers import Workers
from kllm.telemetry.metrics import Metrics
from kllm.telemetry.routing_metrics import routing_metrics
from kllm.telemetry.slo_metrics import slo_metrics
from kllm.tokenization.chat_template import ChatTemplate
from kllm.tokenization.tokenizer import Tokenizer

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
        info = self.gateway.info
        if info is not None and len(text) > info.max_model_len * self._longest_token:
            raise InvalidRequest(
                f"the prompt has {len(text)} characters, more than fit into the model's context of "
                f"{info.max_model_len} tokens",
                "prompt",
                "context_length_exceeded",
            )
        return await self.workers.run(len(text), self.tokenizer.encode, text, add_special_tokens)

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
        plain = [message.model_dump(exclude_none=True) for message in messages]
        plain_tools = [tool.model_dump(exclude_none=True) for tool in tools] if tools else None

        def render() -> str:
            return self.chat_template.render(
                plain, tools=plain_tools, **{"add_generation_prompt": add_generation_prompt, **variables}
            )

        return await self.workers.run(sum(len(str(message.get("content"))) for message in plain), render)
