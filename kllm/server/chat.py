"""/v1/chat/completions: messages to a prompt, pieces to chat choices."""

from __future__ import annotations

from typing import Any

from kllm.request import InvalidRequest
from kllm.server.generation import Piece, Result
from kllm.server.jobs import Caller, make_job
from kllm.server.logprobs import chat_logprobs, prompt_logprobs
from kllm.server.protocol import ChatCompletionRequest
from kllm.server.reply import Job
from kllm.server.sampling import checked_params
from kllm.server.service import Service


async def chat_job(service: Service, body: ChatCompletionRequest, caller: Caller) -> Job:
    """Raises InvalidRequest or ApiError."""
    model = service.require_model(body.model)
    service.require_ready()
    if body.stream and body.prompt_logprobs is not None:
        raise InvalidRequest("prompt_logprobs cannot be streamed", "prompt_logprobs")
    if body.top_logprobs and not body.logprobs:
        raise InvalidRequest("top_logprobs needs logprobs", "top_logprobs")
    params = await checked_params(
        body,
        service.tokenizer,
        service.workers,
        max_tokens=_max_tokens(body),
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
    )
    variables = dict(body.chat_template_kwargs or {})
    if body.reasoning_effort is not None:
        variables.setdefault("reasoning_effort", body.reasoning_effort)
    tools = None if body.tool_choice == "none" else body.tools
    opening = body.add_generation_prompt is not False
    text = await service.render_chat(body.messages, tools, opening, variables)
    prompt = await service.encode(text, bool(body.add_special_tokens))
    return make_job("chatcmpl", caller, model, body, [prompt], params)


def _max_tokens(body: ChatCompletionRequest) -> int | None:
    """None: as many as the model's length allows."""
    if body.max_completion_tokens is not None:
        return body.max_completion_tokens
    if body.max_tokens == 0:
        raise InvalidRequest("max_tokens must be at least 1", "max_tokens")
    return body.max_tokens


class ChatFormat:
    kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"

    def __init__(self, service: Service, body: ChatCompletionRequest, job: Job) -> None:
        self._texts = service.texts
        self._top = (body.top_logprobs or 0) if body.logprobs else None
        self._ids = bool(body.return_token_ids)
        self._prompt = job.requests[0].prompt_token_ids

    def opening(self, piece: Piece) -> tuple[dict[str, Any] | None, dict[str, Any]]:
        choice = {
            "index": piece.index,
            "delta": {"role": "assistant", "content": ""},
            "logprobs": None,
            "finish_reason": None,
        }
        return choice, {"prompt_token_ids": self._prompt} if self._ids else {}

    def delta(self, piece: Piece) -> dict[str, Any] | None:
        finished = piece.finish_reason is not None
        if not (piece.text or finished or self._ids or (self._top is not None and piece.logprobs)):
            return None
        choice: dict[str, Any] = {
            "index": piece.index,
            "delta": {"content": piece.text} if piece.text or not finished else {},
            "logprobs": self._logprobs(piece),
            "finish_reason": piece.finish_reason,
        }
        if finished:
            choice["stop_reason"] = piece.stop_reason
        if self._ids:
            choice["token_ids"] = piece.token_ids
        return choice

    def choice(self, result: Result) -> dict[str, Any]:
        choice: dict[str, Any] = {
            "index": result.index,
            "message": {"role": "assistant", "content": result.text, "refusal": None},
            "logprobs": self._logprobs(result),
            "finish_reason": result.finish_reason,
            "stop_reason": result.stop_reason,
        }
        if self._ids:
            choice["token_ids"] = result.token_ids
        return choice

    def _logprobs(self, output: Piece | Result) -> dict[str, Any] | None:
        if self._top is None or output.logprobs is None:
            return None
        return chat_logprobs(self._texts, output.logprobs, self._top)

    def extra(self, results: list[Result]) -> dict[str, Any]:
        extra: dict[str, Any] = {}
        if self._ids:
            extra["prompt_token_ids"] = self._prompt
        entries = results[0].prompt_logprobs
        if entries is not None:
            extra["prompt_logprobs"] = prompt_logprobs(self._texts, entries)
        return extra
