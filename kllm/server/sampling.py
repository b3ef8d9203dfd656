"""From the fields of a request body to SamplingParams."""

from __future__ import annotations

import re
from typing import Any

import msgspec

from kllm.request import MAX_BAD_WORDS, MAX_STOP_LENGTH, InvalidRequest, SamplingParams, StructuredOutputs
from kllm.server.protocol import ResponseFormat, SamplingFields, StructuredOutputsBody
from kllm.server.workers import CALL_CHARS, INLINE_CHARS, Workers
from kllm.tokenization.bad_words import bad_word_ids
from kllm.tokenization.text_size import text_size
from kllm.tokenization.tokenizer import Tokenizer

_PLAIN_FIELDS = (
    "n", "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty",
    "seed", "min_tokens", "include_stop_str_in_output", "ignore_eos", "skip_special_tokens", "prompt_logprobs",
)  # fmt: skip


async def checked_params(
    body: SamplingFields, tokenizer: Tokenizer, workers: Workers, *, max_tokens: int | None, logprobs: int | None
) -> SamplingParams:
    """sampling_params, with structured outputs checked; in a thread where there are many bad words to tokenise, or
    long lists. Raises InvalidRequest."""
    words = (body.bad_words or [])[: MAX_BAD_WORDS // 2]
    lists = (body.logit_bias, body.allowed_token_ids, body.stop_token_ids)
    size = 2 * sum(len(word) + CALL_CHARS for word in words) + text_size(lists, INLINE_CHARS)
    params = await workers.run(size, sampling_params, body, tokenizer, max_tokens=max_tokens, logprobs=logprobs)
    await check_structured_outputs(params, workers)
    return params


def sampling_params(
    body: SamplingFields, tokenizer: Tokenizer, *, max_tokens: int | None, logprobs: int | None
) -> SamplingParams:
    """Everything that the body says about sampling; what it leaves out takes the defaults of SamplingParams.
    Raises InvalidRequest."""
    given = {name: value for name in _PLAIN_FIELDS if (value := getattr(body, name)) is not None}
    stop = () if body.stop is None else body.stop
    bad_words = tuple(body.bad_words or ())
    _check_bad_words(bad_words)
    params = SamplingParams(
        **given,
        max_tokens=max_tokens,
        logprobs=logprobs,
        stop=(stop,) if isinstance(stop, str) else tuple(stop),
        stop_token_ids=tuple(body.stop_token_ids or ()),
        logit_bias=_logit_bias(body.logit_bias),
        allowed_token_ids=None if body.allowed_token_ids is None else tuple(body.allowed_token_ids),
        bad_words=bad_words,
        bad_words_token_ids=bad_word_ids(tokenizer, bad_words),
        structured_outputs=structured_outputs(body),
    )
    params.validate()
    return params


def _check_bad_words(words: tuple[str, ...]) -> None:
    if len(words) > MAX_BAD_WORDS // 2:  # each may have two spellings
        raise InvalidRequest(f"at most {MAX_BAD_WORDS // 2} bad words are allowed", "bad_words")
    if any(not word.strip() or len(word) > MAX_STOP_LENGTH for word in words):
        raise InvalidRequest(f"bad words must have 1 to {MAX_STOP_LENGTH} characters", "bad_words")


def _logit_bias(bias: dict[str, float] | None) -> dict[int, float] | None:
    if not bias:
        return None
    for key in bias:
        if re.fullmatch(r"[0-9]{1,10}", key) is None:
            raise InvalidRequest(f"logit_bias: {key[:40]!r} is not a token id", "logit_bias")
    return {int(key): value for key, value in bias.items()}


async def check_structured_outputs(params: SamplingParams, workers: Workers) -> None:
    """Refuse a specification that cannot be compiled before anything waits for it. Raises InvalidRequest."""
    spec = params.structured_outputs
    if spec is not None:
        from kllm.engine.grammar import check_structured_outputs as check  # not at start: most servers never need it

        await workers.run(INLINE_CHARS, check, spec)


def structured_outputs(body: SamplingFields) -> StructuredOutputs | None:
    """What the output must match, given in OpenAI's or in vLLM's way. Raises InvalidRequest."""
    asked = _from_response_format(body.response_format)
    if body.structured_outputs is None:
        return asked
    if asked is not None:
        raise InvalidRequest("response_format and structured_outputs exclude each other", "structured_outputs")
    return _from_extension(body.structured_outputs)


def _from_response_format(wanted: ResponseFormat | None) -> StructuredOutputs | None:
    if wanted is None or wanted.type == "text":
        return None
    if wanted.type == "json_object":
        return StructuredOutputs(json_object=True)
    if wanted.json_schema is None:
        raise InvalidRequest(
            "response_format of type json_schema needs the field json_schema", "response_format.json_schema"
        )
    schema = wanted.json_schema.json_schema
    if schema is None:
        return StructuredOutputs(json_object=True)
    return StructuredOutputs(json=_schema_text(schema))


def _from_extension(wanted: StructuredOutputsBody) -> StructuredOutputs:
    structured = StructuredOutputs(
        json=_schema_text(wanted.json_) if isinstance(wanted.json_, dict) else wanted.json_,
        regex=wanted.regex,
        grammar=wanted.grammar,
        choice=None if wanted.choice is None else tuple(wanted.choice),
        json_object=bool(wanted.json_object),
    )
    structured.key()
    return structured


def _schema_text(schema: dict[str, Any]) -> str:
    return msgspec.json.encode(schema).decode()
