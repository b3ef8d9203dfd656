"""From a Submit to the body of /v1/completions, and from its streamed chunks back to Deltas. Pure.

Sent are token ids, and asked for are token ids (`return_token_ids`): text would have to be tokenised again, and that
does not always give the tokens that were sampled.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import msgspec

from kllm.cluster.external.errors import EngineFault, NoTokenIds
from kllm.cluster.external.http_engine import message_of
from kllm.messages import Submit
from kllm.request import Delta, FinishReason, InvalidRequest, SamplingParams, TokenLogprobs

TOKEN_PREFIX = "token_id:"  # how vLLM writes tokens that are asked for as ids
NO_TOKEN_IDS = "its completions carry no token ids (return_token_ids): a recent vLLM, or kLLM, is needed"
# Whatever their value: engines take what a request leaves out from the model's own defaults.
_ALWAYS = (
    "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty",
)  # fmt: skip
_DEFAULTS = SamplingParams()


def completion_body(submit: Submit, model: str, max_model_len: int, *, absolute_draws: bool) -> bytes:
    """JSON. Outputs of earlier attempts go behind the prompt: the engine continues after them.

    absolute_draws: the engine's draws depend on the position in the sequence, so the seed stays; others start a new
    series of draws, which must not be the one that the outputs were drawn with.
    Raises InvalidRequest for what cannot be expressed in a streamed completion."""
    request, params, done = submit.request, submit.request.params, len(submit.outputs)
    _check(submit)
    prompt = [*request.prompt_token_ids, *submit.outputs]
    limit = max_model_len - len(request.prompt_token_ids) if params.max_tokens is None else params.max_tokens
    body: dict[str, Any] = {
        "model": model,
        "prompt": prompt,
        "max_tokens": 1 if submit.prefill_only else limit - done,
        "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        "return_token_ids": True,
    }
    body |= {name: getattr(params, name) for name in _ALWAYS}
    if params.seed is not None:
        body["seed"] = params.seed if absolute_draws else _later_seed(params.seed, done)
    if params.ignore_eos:
        body["ignore_eos"] = True
    if params.min_tokens > done:
        body["min_tokens"] = min(params.min_tokens - done, body["max_tokens"])
    body |= _lists(params)
    if params.logprobs is not None:
        body |= {"logprobs": params.logprobs, "return_tokens_as_token_ids": True}
    if params.structured_outputs is not None:
        body["structured_outputs"] = msgspec.to_builtins(params.structured_outputs)
    if request.cache_salt:
        body["cache_salt"] = request.cache_salt
    return msgspec.json.encode(body)


def _lists(params: SamplingParams) -> dict[str, Any]:
    """Those that are given; stop strings are looked for in the gateway's server."""
    given: dict[str, Any] = {}
    if params.stop_token_ids:
        given["stop_token_ids"] = params.stop_token_ids
    if params.logit_bias:
        given["logit_bias"] = {str(token): bias for token, bias in params.logit_bias.items()}
    if params.allowed_token_ids is not None:
        given["allowed_token_ids"] = params.allowed_token_ids
    if params.bad_words:
        given["bad_words"] = params.bad_words
    return given


def _check(submit: Submit) -> None:
    params = submit.request.params
    if params.prompt_logprobs is not None:
        raise InvalidRequest("an external engine does not stream prompt_logprobs", "prompt_logprobs")
    if submit.request.adapter:
        raise InvalidRequest("an external engine has no adapters", "model")
    if params.structured_outputs is not None and submit.outputs:
        raise InvalidRequest(
            "its instance was lost, and an external engine cannot continue a structured output", "structured_outputs"
        )
    if params.bad_words_token_ids and not params.bad_words:
        raise InvalidRequest("an external engine takes bad words as text only", "bad_words")


def _later_seed(seed: int, done: int) -> int:
    return (seed + done + 2**63) % 2**64 - 2**63


def ended_already(submit: Submit) -> Delta | None:
    """The end of a request whose last attempt was lost between its last token and its end."""
    request, params, done = submit.request, submit.request.params, len(submit.outputs)
    reason: FinishReason | None = None
    stop_reason = None
    if done and submit.outputs[-1] in params.stop_token_ids and done > params.min_tokens:
        reason, stop_reason = "stop", submit.outputs[-1]
    elif params.max_tokens is not None and done >= params.max_tokens:
        reason = "length"
    if reason is None:
        return None
    return Delta(
        request_id=request.request_id,
        attempt=submit.attempt,
        index=done,
        finish_reason=reason,
        stop_reason=stop_reason,
    )


# -- answers ---------------------------------------------------------------------------------------------------

TokenId = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]


class _Logprobs(msgspec.Struct):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None] | None = None


class _Choice(msgspec.Struct):
    text: str = ""
    token_ids: list[TokenId] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    logprobs: _Logprobs | None = None


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens_details: _Details | None = None


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None


_decoder = msgspec.json.Decoder(_Chunk)


class ChunkReader:
    """Of one attempt. next_index: output tokens that there are now, those of earlier attempts included.

    cached_tokens: prompt tokens that the engine found in its cache, as far as it has said so. finished: the request is
    over; what still comes is not read.
    """

    def __init__(self, submit: Submit) -> None:
        self.next_index = len(submit.outputs)
        self.cached_tokens = 0
        self.finished = False
        self._submit = submit
        limit = submit.request.params.max_tokens
        self._limit = len(submit.outputs) + 1 if submit.prefill_only else limit

    def read(self, data: bytes) -> Delta | None:
        """What is new in a chunk. Raises EngineFault for what is malformed or more than was asked for, InvalidRequest
        where the engine says so in the middle of the stream."""
        try:
            chunk = _decoder.decode(data)
        except (msgspec.DecodeError, RecursionError) as error:
            raise EngineFault(f"a malformed chunk: {error}") from error
        if chunk.error:
            raise _stream_error(chunk.error)
        if chunk.usage is not None and chunk.usage.prompt_tokens_details is not None:
            self.cached_tokens = max(0, chunk.usage.prompt_tokens_details.cached_tokens or 0)
        if not chunk.choices or self.finished:
            return None
        choice = chunk.choices[0]
        tokens = choice.token_ids
        if tokens is None and choice.text:
            raise NoTokenIds(NO_TOKEN_IDS)
        return self._delta(choice, tokens or [])

    def _delta(self, choice: _Choice, tokens: list[int]) -> Delta | None:
        reason = _finish_reason(choice.finish_reason)
        if not tokens and reason is None:
            return None
        index, self.next_index = self.next_index, self.next_index + len(tokens)
        if self._limit is not None and self.next_index > self._limit:
            raise EngineFault("the engine sends more tokens than were asked for")
        self.finished = reason is not None
        if reason == "length" and self._submit.prefill_only and not self._complete:
            reason = None
        most = self._submit.request.params.logprobs
        return Delta(
            request_id=self._submit.request.request_id,
            attempt=self._submit.attempt,
            index=index,
            token_ids=tokens,
            logprobs=_logprobs(choice.logprobs, tokens, most) if most is not None and tokens else None,
            num_cached_tokens=self.cached_tokens,
            finish_reason=reason,
            stop_reason=choice.stop_reason if reason == "stop" else None,
        )

    @property
    def _complete(self) -> bool:
        """All that the client asked for is there, not only what this attempt was to add."""
        limit = self._submit.request.params.max_tokens
        return limit is not None and self.next_index >= limit


def _finish_reason(reason: str | None) -> FinishReason | None:
    """Raises EngineFault for an end that is not one of the request's own."""
    if reason is None or reason == "stop" or reason == "length":
        return reason  # type: ignore[return-value]
    raise EngineFault(f"the engine ended the request: {reason[:100]}")


def _stream_error(error: Any) -> Exception:
    code = error.get("code") if isinstance(error, dict) else None
    if code in (400, 422):
        return InvalidRequest(message_of(error))
    return EngineFault(f"the engine says: {message_of(error)}")


def _logprobs(given: _Logprobs | None, tokens: Sequence[int], most: int) -> list[TokenLogprobs]:
    """most: alternatives for each token. Ranks are exact within those that the engine names; a token beyond them gets
    the first rank after them."""
    if given is None or len(given.tokens) != len(tokens) or len(given.token_logprobs) != len(tokens):
        raise EngineFault("log-probabilities do not match the tokens")
    tops = given.top_logprobs if given.top_logprobs is not None else [None] * len(tokens)
    if len(tops) != len(tokens):
        raise EngineFault("log-probabilities do not match the tokens")
    entries = []
    for token, logprob, top in zip(tokens, given.token_logprobs, tops, strict=True):
        if logprob is None:
            raise EngineFault("a token has no log-probability")
        named = sorted(((_token_id(name), value) for name, value in (top or {}).items()), key=lambda pair: -pair[1])
        rank = 1 + sum(value > logprob for _, value in named)
        entries.append(TokenLogprobs(token, logprob, rank, tuple(named[:most])))
    return entries


def _token_id(name: str) -> int:
    number = name.removeprefix(TOKEN_PREFIX)
    if not number.isascii() or not number.isdigit() or len(number) > 10:
        raise EngineFault("log-probabilities name tokens by their text: return_tokens_as_token_ids is not understood")
    return int(number)
