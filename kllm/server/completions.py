"""/v1/completions: prompts as text or token ids, pieces to legacy choices, echo."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from kllm.request import InvalidRequest, TokenLogprobs
from kllm.server.generation import Piece, Result
from kllm.server.jobs import Caller, make_job
from kllm.server.logprobs import completion_logprobs, prompt_logprobs
from kllm.server.protocol import MAX_PROMPTS, CompletionRequest
from kllm.server.reply import Job
from kllm.server.sampling import checked_params
from kllm.server.service import Service

DEFAULT_MAX_TOKENS = 16


async def completion_job(service: Service, body: CompletionRequest, caller: Caller) -> Job:
    """Raises InvalidRequest or ApiError."""
    model = service.require_model(body.model)
    instance = service.require_ready()
    if body.stream and body.prompt_logprobs is not None:
        raise InvalidRequest("prompt_logprobs cannot be streamed", "prompt_logprobs")
    if body.best_of is not None and body.best_of != (body.n or 1):
        raise InvalidRequest("best_of is supported only as much as n", "best_of")
    hide_output = body.max_tokens == 0
    if hide_output and not body.echo:
        raise InvalidRequest("max_tokens must be at least 1, or 0 together with echo", "max_tokens")
    params = await checked_params(
        body,
        service.tokenizer,
        service.workers,
        max_tokens=1 if hide_output else DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens,
        logprobs=body.logprobs,
    )
    if body.echo and body.logprobs is not None:
        most = max(body.logprobs, params.prompt_logprobs or 0)
        params = msgspec.structs.replace(params, prompt_logprobs=most)
    prompts = await _prompts(service, body)
    # A default is no wish: near the context's end there is room for less.
    room = instance.max_model_len if body.max_tokens is None else None
    job = make_job("cmpl", caller, model, body, prompts, params, room)
    job.hide_output = hide_output
    return job


async def _prompts(service: Service, body: CompletionRequest) -> list[list[int]]:
    """Token ids of every prompt."""
    prompt = body.prompt
    special = body.add_special_tokens is not False
    if isinstance(prompt, str):
        return [await service.encode(prompt, special)]
    if not prompt:
        raise InvalidRequest("the prompt must not be empty", "prompt")
    if isinstance(prompt[0], int):  # one prompt: the body's model lets no list have items of both kinds
        return [prompt]
    if len(prompt) > MAX_PROMPTS:
        raise InvalidRequest(f"at most {MAX_PROMPTS} prompts may be given at once", "prompt")
    return await service.encode_prompts(prompt, special)


class CompletionFormat:
    kind = "text_completion"
    chunk_kind = "text_completion"

    def __init__(self, service: Service, body: CompletionRequest, job: Job) -> None:
        self._texts = service.texts
        self._tokenizer = service.tokenizer
        self._top = body.logprobs
        self._ids = bool(body.return_token_ids)
        self._echo = bool(body.echo)
        self._given = body.prompt
        self._asked_prompt_logprobs = body.prompt_logprobs is not None
        self._job = job
        self._offsets: dict[int, int] = {}  # by choice: where the text of its next token starts, for logprobs
        self._entries: dict[int, list[TokenLogprobs | None]] = {}  # of prompts, by their first choice

    def opening(self, piece: Piece) -> tuple[dict[str, Any] | None, dict[str, Any]]:
        if not self._echo:
            return None, {}
        text = self._prompt_text(piece.index)
        self._next_offset(piece.index, self._prompt(piece.index))
        logprobs = None
        if piece.prompt_logprobs is not None:
            self._entries[piece.index] = piece.prompt_logprobs
        entries = self._entries.get(self._first(piece.index))
        if self._top is not None and entries is not None:
            logprobs = completion_logprobs(self._texts, entries, self._prompt(piece.index), self._top, 0)
        choice = self._choice(piece.index, text, logprobs, [])
        if self._ids:
            choice["prompt_token_ids"] = self._prompt(piece.index)
        return choice, {}

    def delta(self, piece: Piece) -> dict[str, Any] | None:
        finished = piece.finish_reason is not None
        if self._job.hide_output:
            choice = self._choice(piece.index, "", None, [])
        else:
            if not (piece.text or finished or self._ids or (self._top is not None and piece.logprobs)):
                return None
            offset = self._next_offset(piece.index, piece.token_ids)
            choice = self._choice(piece.index, piece.text, self._logprobs(piece, offset), piece.token_ids)
        return choice | self._ending(piece) if finished else choice

    def choice(self, result: Result) -> dict[str, Any]:
        if self._job.hide_output:
            text, ids, entries = "", [], []
        else:
            text, ids, entries = result.text, result.token_ids, result.logprobs
        if result.prompt_logprobs is not None:
            self._entries[result.index] = result.prompt_logprobs
        entries_of_prompt = self._entries.get(self._first(result.index))
        shown: list[TokenLogprobs | None] = list(entries)
        if self._echo:
            text = self._prompt_text(result.index) + text
            shown = [*(entries_of_prompt or ()), *shown]
        logprobs = None
        if self._top is not None:
            all_ids = [*self._prompt(result.index), *ids] if self._echo else ids
            logprobs = completion_logprobs(self._texts, shown, all_ids, self._top, 0)
        choice = self._choice(result.index, text, logprobs, ids)
        choice |= self._ending(result)
        if self._ids:
            choice["prompt_token_ids"] = self._prompt(result.index)
        if self._asked_prompt_logprobs and entries_of_prompt is not None:
            choice["prompt_logprobs"] = prompt_logprobs(self._texts, entries_of_prompt)
        return choice

    def _ending(self, end: Piece | Result) -> dict[str, Any]:
        """Of an output that is not shown no token says why it ended."""
        if self._job.hide_output:
            return {"finish_reason": "length", "stop_reason": None}
        return {"finish_reason": end.finish_reason, "stop_reason": end.stop_reason}

    def extra(self, results: list[Result]) -> dict[str, Any]:
        return {}

    def _choice(self, index: int, text: str, logprobs: dict[str, Any] | None, token_ids: list[int]) -> dict[str, Any]:
        choice: dict[str, Any] = {"index": index, "text": text, "logprobs": logprobs, "finish_reason": None}
        if self._ids:
            choice["token_ids"] = token_ids
        return choice

    def _logprobs(self, piece: Piece, offset: int) -> dict[str, Any] | None:
        if self._top is None or piece.logprobs is None:
            return None
        return completion_logprobs(self._texts, piece.logprobs, piece.token_ids, self._top, offset)

    def _next_offset(self, index: int, token_ids: Sequence[int]) -> int:
        """Where the text of these tokens starts in the choice. Tokens count as they are shown one by one, as in a
        whole reply: their text may be sent later than they are (stop strings, characters of several tokens)."""
        start = self._offsets.get(index, 0)
        if self._top is not None:
            self._offsets[index] = start + sum(len(self._texts.text(token)) for token in token_ids)
        return start

    def _first(self, index: int) -> int:
        """The choice that computes the prompt of this one, and its log-probabilities."""
        return index - index % self._job.n

    def _prompt(self, index: int) -> list[int]:
        return self._job.requests[index].prompt_token_ids

    def _prompt_text(self, index: int) -> str:
        """As the client gave it where it gave text, else decoded."""
        given = self._given
        if isinstance(given, str):
            return given
        one = given[index // self._job.n]
        if isinstance(one, str):
            return one
        return self._tokenizer.decode(self._prompt(index), skip_special_tokens=False)
