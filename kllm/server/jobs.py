"""From prompts and sampling parameters to the engine requests of one API request."""

from __future__ import annotations

import re
import secrets
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
from starlette.requests import Request

from kllm.request import InvalidRequest, SamplingParams
from kllm.request import Request as EngineRequest
from kllm.server.protocol import ID_PATTERN, MAX_PROMPTS, SamplingFields
from kllm.server.reply import Job

_ID = re.compile(ID_PATTERN)


def request_id_from(header: str | None) -> str:
    """The client's X-Request-Id if it is a usable id, else a new one."""
    return header if header is not None and _ID.fullmatch(header) else uuid.uuid4().hex


@dataclass(frozen=True, slots=True)
class Caller:
    """Who asks. tenant: one for every API key, "" where there is at most one or all share the cache. Tenants have no
    cached prefixes in common, so that none can learn from usage or response times what another has asked."""

    request_id: str
    tenant: str = ""

    @staticmethod
    def of(request: Request) -> Caller:
        return Caller(request.state.request_id, getattr(request.state, "tenant", ""))


def make_job(
    kind: str,
    caller: Caller,
    model: str,
    body: SamplingFields,
    prompts: Sequence[list[int]],
    params: SamplingParams,
    room: int | None = None,
) -> Job:
    """`kind`: prefix of the reply's id (chatcmpl, cmpl). Choice p * n + j is output j of prompt p. room: tokens that
    prompt and output may have together; less output is asked for where it is not enough.

    Outputs of one prompt are those of Request.choice: they share the prompt's blocks, and output j draws with seed + j
    (of a seed drawn here if the client gave none). Engine ids have random digits, for clients may use an id twice.
    Raises InvalidRequest.
    """
    n = params.n
    if len(prompts) * n > MAX_PROMPTS:
        raise InvalidRequest(f"at most {MAX_PROMPTS} outputs may be asked for at once", "n")
    reply_id = f"{kind}-{body.request_id or caller.request_id}"
    base = f"{reply_id}-{uuid.uuid4().hex[:8]}"
    seed = secrets.randbits(62) if params.seed is None else params.seed
    requests: list[EngineRequest] = []
    for p, prompt in enumerate(prompts):
        if not prompt:
            raise InvalidRequest("the prompt must have at least one token", "prompt")
        first = EngineRequest(
            request_id=f"{base}-p{p}" if p else base,
            prompt_token_ids=prompt,
            params=params if room is None else _within(params, room - len(prompt)),
            cache_salt="\0".join(part for part in (caller.tenant, body.cache_salt) if part),
            priority=body.priority or 0,
        )
        requests += [first.choice(j, seed) for j in range(n)]
    options = body.stream_options
    if options is not None and not body.stream:
        raise InvalidRequest("stream_options needs stream", "stream_options")
    return Job(
        reply_id,
        caller.request_id,
        int(time.time()),
        model,
        requests,
        n,
        usage=options is not None and bool(options.include_usage),
        each_usage=options is not None and bool(options.continuous_usage_stats),
    )


def _within(params: SamplingParams, room: int) -> SamplingParams:
    if params.max_tokens is None or params.max_tokens <= max(1, room):
        return params
    return msgspec.structs.replace(params, max_tokens=max(1, room))
