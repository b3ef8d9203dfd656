"""Requests, sampling parameters and what comes back: plain data that crosses process boundaries.

Everything here is a msgspec struct: cheap to make, typed, and encoded to msgpack without pickle.
Nothing in this module imports torch or does I/O.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import msgspec

FinishReason = Literal["stop", "length", "abort", "error"]

GREEDY_TEMPERATURE = 1e-5  # below this, sampling is argmax
MIN_TEMPERATURE = 0.01  # between the two, temperature is raised to this for numerical safety
MAX_LOGPROBS = 20
MAX_CHOICES = 128
MAX_STOP_STRINGS = 16
MAX_STOP_LENGTH = 1024
MAX_LOGIT_BIAS = 1024
MAX_BAD_WORDS = 1024


class InvalidRequest(ValueError):
    """The request itself is wrong; `param` names the field, `code` is OpenAI's error code."""

    def __init__(self, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code


class StructuredOutputs(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What the output must match. Exactly one field is set.

    json: a JSON schema as text; regex: a regular expression over the whole output;
    grammar: a Lark grammar as llguidance reads it; choice: one of these strings.
    """

    json: str | None = None
    regex: str | None = None
    grammar: str | None = None
    choice: tuple[str, ...] | None = None
    json_object: bool = False

    def key(self) -> tuple[str, str]:
        """(kind, text): the key under which a compiled grammar is cached. Raises InvalidRequest."""
        kinds = [
            (name, value)
            for name in ("json", "regex", "grammar", "choice", "json_object")
            if (value := getattr(self, name))
        ]
        if len(kinds) != 1:
            raise InvalidRequest("exactly one kind of structured output must be given", "structured_outputs")
        name, value = kinds[0]
        if name == "choice":
            try:
                return name, msgspec.json.encode(value).decode()
            except UnicodeEncodeError:
                raise InvalidRequest("a choice is not valid Unicode", "structured_outputs") from None
        return name, "" if name == "json_object" else value


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How output tokens are chosen and when output ends. Names and defaults are vLLM's.

    logprobs: number of top alternatives reported beside the sampled token (None: no logprobs at all).
    prompt_logprobs: the same for every prompt token; the prompt is then recomputed, not taken from cache.
    seed: draws depend on (seed, position) only, so output does not depend on what else is in the batch.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0 and -1: off
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    max_tokens: int | None = 16  # None: until the model's length
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: tuple[int, ...] | None = None
    bad_words: tuple[str, ...] = ()
    bad_words_token_ids: tuple[tuple[int, ...], ...] = ()  # filled from bad_words by whoever holds the tokenizer
    structured_outputs: StructuredOutputs | None = None
    skip_special_tokens: bool = True
    detokenize: bool = True

    def __post_init__(self) -> None:
        for name in ("stop", "bad_words"):  # one may be given as it is, as in vLLM: a string is a sequence as well
            if isinstance(getattr(self, name), str):
                msgspec.structs.force_setattr(self, name, (getattr(self, name),))

    @property
    def greedy(self) -> bool:
        return self.temperature < GREEDY_TEMPERATURE

    def validate(self, vocab_size: int | None = None) -> None:
        """Raise InvalidRequest naming the first field out of range."""
        _check_ranges(self)
        _check_lists(self)
        if self.structured_outputs is not None:
            self.structured_outputs.key()
        if vocab_size is not None:
            _check_token_ids(self, vocab_size)


def _check_ranges(p: SamplingParams) -> None:
    finite = ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty")
    for name in finite:
        if not math.isfinite(getattr(p, name)):
            raise InvalidRequest(f"{name} must be a finite number", name)
    bounds: tuple[tuple[str, float, float], ...] = (
        ("n", 1, MAX_CHOICES),
        ("temperature", 0.0, 2.0),
        ("min_p", 0.0, 1.0),
        ("presence_penalty", -2.0, 2.0),
        ("frequency_penalty", -2.0, 2.0),
        ("top_k", -1, 2**31 - 1),
        ("min_tokens", 0, 2**31 - 1),
        ("max_tokens", 1, 2**31 - 1),
        ("logprobs", 0, MAX_LOGPROBS),
        ("prompt_logprobs", 0, MAX_LOGPROBS),
        ("seed", -(2**63), 2**63 - 1),
    )
    for name, low, high in bounds:
        value = getattr(p, name)
        if value is not None and not low <= value <= high:
            raise InvalidRequest(f"{name} must be between {low} and {high}, got {value}", name)
    if not 0.0 < p.top_p <= 1.0:
        raise InvalidRequest(f"top_p must be above 0 and at most 1, got {p.top_p}", "top_p")
    if not 0.0 < p.repetition_penalty <= 100.0:
        raise InvalidRequest(
            f"repetition_penalty must be above 0 and at most 100, got {p.repetition_penalty}", "repetition_penalty"
        )
    if p.max_tokens is not None and p.min_tokens > p.max_tokens:
        raise InvalidRequest(f"min_tokens ({p.min_tokens}) must not exceed max_tokens ({p.max_tokens})", "min_tokens")


def _check_lists(p: SamplingParams) -> None:
    if len(p.stop) > MAX_STOP_STRINGS:
        raise InvalidRequest(f"at most {MAX_STOP_STRINGS} stop strings are allowed", "stop")
    for text in p.stop:
        if not text or len(text) > MAX_STOP_LENGTH:
            raise InvalidRequest(f"stop strings must have 1 to {MAX_STOP_LENGTH} characters", "stop")
    for name in ("bad_words", "bad_words_token_ids"):
        words: Sequence[Sequence[object] | str] = getattr(p, name)
        if len(words) > MAX_BAD_WORDS:
            raise InvalidRequest(f"at most {MAX_BAD_WORDS} bad words are allowed", "bad_words")
        if any(len(word) == 0 for word in words):
            raise InvalidRequest("bad words must not be empty", "bad_words")
    if p.allowed_token_ids is not None and not p.allowed_token_ids:
        raise InvalidRequest("allowed_token_ids must not be empty", "allowed_token_ids")
    if p.logit_bias is not None:
        if len(p.logit_bias) > MAX_LOGIT_BIAS:
            raise InvalidRequest(f"logit_bias may name at most {MAX_LOGIT_BIAS} tokens", "logit_bias")
        for token, bias in p.logit_bias.items():
            if not -100.0 <= bias <= 100.0:
                raise InvalidRequest(f"logit_bias[{token}] must be between -100 and 100", "logit_bias")


def _check_token_ids(p: SamplingParams, vocab_size: int) -> None:
    lists: tuple[tuple[str, Sequence[int]], ...] = (
        ("stop_token_ids", p.stop_token_ids),
        ("allowed_token_ids", p.allowed_token_ids or ()),
        ("logit_bias", tuple(p.logit_bias or ())),
        ("bad_words", tuple(t for word in p.bad_words_token_ids for t in word)),
    )
    for name, ids in lists:
        for token in ids:
            if not 0 <= token < vocab_size:
                raise InvalidRequest(f"{name}: token id {token} is outside the vocabulary (0..{vocab_size - 1})", name)


class Request(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One sequence to generate. n > 1 becomes n requests, the later ones naming the first as `leader`.

    cache_salt and adapter are part of every prefix-cache key: requests that differ in either never share KV.
    leader: request id of the sibling that computes the shared prompt first; this one waits for its blocks.
    A request with a seed of None gets one from the gateway, so that a resubmission draws the same tokens.
    """

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    cache_salt: str = ""
    adapter: str = ""
    priority: int = 0  # lower runs first, as in vLLM
    leader: str | None = None

    def choice(self, index: int, seed: int) -> Request:
        """The request for the index-th of n outputs: later ones follow the first, and each draws its own numbers.

        Its seed is seed + index, so one choice can be repeated alone with n = 1."""
        params = msgspec.structs.replace(self.params, n=1, seed=_as_seed(seed + index))
        if index == 0:
            return msgspec.structs.replace(self, params=params)
        params = msgspec.structs.replace(params, prompt_logprobs=None)
        return msgspec.structs.replace(
            self, request_id=f"{self.request_id}-{index}", params=params, leader=self.request_id
        )


def _as_seed(value: int) -> int:
    """Wrap into the signed 64 bits that a seed may have."""
    return (value + 2**63) % 2**64 - 2**63


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Log-probability of one token before penalties and temperature (natural log).

    rank: 1 for the most likely token. top: (token id, logprob) of the most likely tokens, best first.
    """

    token_id: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...] = ()


class Timings(msgspec.Struct, frozen=True, array_like=True):
    """Durations inside the instance, in seconds: waiting for a place, then computing the prompt."""

    queue_s: float
    prefill_s: float


class Delta(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """New output of one request. `index` is the number of output tokens before this delta.

    The last delta of a request carries finish_reason (and `error` when that is "error"; `invalid` then says that the
    request itself was at fault, so the client gets a 400 and not a 500). "abort" gives the request back: it is to go on
    elsewhere, and its instance was only busy if there is no `error`.
    stop_reason: the stop token id or stop string that ended the output; None for EOS.
    timings come with the first token of an attempt. prompt_logprobs: one entry per prompt token, None first.
    """

    request_id: str
    attempt: int = 0
    index: int = 0
    token_ids: list[int] = []
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    num_cached_tokens: int = 0
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    error: str | None = None
    invalid: bool = False
    timings: Timings | None = None


class CompletionOutput(msgspec.Struct, kw_only=True):
    """One of the n outputs of a request, as the offline API returns it."""

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: list[TokenLogprobs] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None


class RequestOutput(msgspec.Struct, kw_only=True):
    """All outputs of one prompt, as the offline API returns them."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool = True
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    num_cached_tokens: int = 0
