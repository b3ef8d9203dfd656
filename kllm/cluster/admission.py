"""What the gateway refuses at once: requests that no instance could ever run, and requests beyond its queue."""

from __future__ import annotations

import math
from collections import deque

import msgspec

from kllm.messages import Hello
from kllm.request import InvalidRequest, Request

TOO_LONG = "context_length_exceeded"


class QueueFull(RuntimeError):
    """As many requests as allowed are in flight; a place should be free in about `retry_after_s` seconds.

    grade: of degradation, where that is the reason."""

    def __init__(self, in_flight: int, retry_after_s: int, grade: int = 0) -> None:
        why = f", and capacity is short (grade {grade})" if grade else ""
        super().__init__(
            f"the server is full: {in_flight} requests are in flight{why}; retry in about {retry_after_s} s"
        )
        self.retry_after_s = retry_after_s


class Unavailable(RuntimeError):
    """No request is taken now: starting, restarting for too long, draining, all too busy, or (retry_after_s is None)
    given up."""

    def __init__(self, message: str, retry_after_s: int | None = None) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


def admit(request: Request, info: Hello, seed: int) -> Request:
    """The request as instances get it: checked against the model, with a seed and a definite max_tokens.

    seed: used if the request has none. A max_tokens of None becomes what the model's length and the KV cache leave.
    Raises InvalidRequest.
    """
    params, length = request.params, len(request.prompt_token_ids)
    params.validate(info.vocab_size)
    if not request.request_id:
        raise InvalidRequest("the request id must not be empty", "request_id")
    if length == 0:
        raise InvalidRequest("the prompt must have at least one token", "prompt")
    if length >= info.max_model_len:
        raise InvalidRequest(
            f"the prompt has {length} tokens, but the model's context of {info.max_model_len} tokens must also hold "
            "at least one token of output",
            "prompt",
            TOO_LONG,
        )
    _check_vocabulary(request, info.vocab_size)
    capacity = info.num_blocks * info.block_tokens + 1  # the last token sampled needs no KV
    room = min(info.max_model_len, capacity) - length
    if room < 1:
        raise InvalidRequest(f"the prompt has {length} tokens, but the KV cache holds {capacity - 1}", "prompt")
    if params.max_tokens is not None:
        _check_room(length, params.max_tokens, info)
    elif params.min_tokens > room:
        raise InvalidRequest(f"min_tokens is {params.min_tokens}, but there is room for {room} tokens", "min_tokens")
    params = msgspec.structs.replace(
        params,
        seed=seed if params.seed is None else params.seed,
        max_tokens=room if params.max_tokens is None else params.max_tokens,
    )
    return msgspec.structs.replace(request, params=params)


def _check_vocabulary(request: Request, vocab_size: int) -> None:
    for token in (min(request.prompt_token_ids), max(request.prompt_token_ids)):
        if not 0 <= token < vocab_size:
            raise InvalidRequest(f"token id {token} is outside the vocabulary (0..{vocab_size - 1})", "prompt")


def _check_room(length: int, max_tokens: int, info: Hello) -> None:
    total = length + max_tokens
    if total > info.max_model_len:
        raise InvalidRequest(
            f"the model's context is {info.max_model_len} tokens, but {total} were requested "
            f"({length} in the prompt, {max_tokens} of output)",
            "max_tokens",
            TOO_LONG,
        )
    blocks = math.ceil((total - 1) / info.block_tokens)
    if blocks > info.num_blocks:
        raise InvalidRequest(
            f"{total} tokens need {blocks} KV blocks, but the cache has {info.num_blocks}; "
            "ask for fewer tokens or give the server more kv_cache_memory",
            "max_tokens",
        )


class CompletionRate:
    """Recent rate of requests that ended, for Retry-After."""

    WINDOW = 64  # ends remembered
    LONGEST_S = 60

    def __init__(self) -> None:
        self._ends: deque[float] = deque(maxlen=self.WINDOW)

    def record(self, now: float) -> None:
        self._ends.append(now)

    def seconds_for(self, requests: float, now: float) -> int:
        """About how long that many more requests take to end: 1 to LONGEST_S, whole seconds as HTTP wants."""
        if len(self._ends) < 2:
            return 1
        interval = (now - self._ends[0]) / len(self._ends)  # up to now, so that a stall shows
        return max(1, min(self.LONGEST_S, math.ceil(interval * requests)))
