"""Replies to completion requests: whole as JSON, or streamed as server-sent events.

What chat and legacy completions have in common is here; how a choice looks is a ReplyFormat.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from fastapi import Request as HttpRequest
from fastapi.responses import Response
from starlette.types import Receive, Scope, Send

from kllm.request import Request
from kllm.server.errors import ClientDisconnected, json_response, log_failure, to_api_error
from kllm.server.events import DONE, sse_event
from kllm.server.generation import Piece, Result

logger = logging.getLogger(__name__)

T = TypeVar("T")

DIRECT_SEND = "kllm.direct_send"  # key in the scope: past the layers that look at how a response starts, for its body
NO_MORE: dict[str, Any] = {}  # fields beside `choices`


@dataclass(slots=True)
class Job:
    """One API request on its way: its sequences (prompt by prompt, n each) and what its reply must say.

    reply_id: the `id` of the reply. usage: whether streaming sends usage at the end, each_usage: in every chunk.
    """

    reply_id: str
    request_id: str
    created: int
    model: str
    requests: list[Request]
    n: int
    usage: bool = False
    each_usage: bool = False
    hide_output: bool = False  # max_tokens=0 with echo: one token is computed and not shown
    tokens: dict[int, int] = field(default_factory=dict)  # output tokens so far, by choice
    cached: dict[int, int] = field(default_factory=dict)  # prompt tokens that came from the cache, by choice

    def count(self, piece: Piece) -> None:
        shown = 0 if self.hide_output else len(piece.token_ids)
        self.tokens[piece.index] = self.tokens.get(piece.index, 0) + shown
        self.cached[piece.index] = piece.num_cached_tokens

    def usage_body(self) -> dict[str, Any]:
        """A prompt counts once, however many outputs it has."""
        first = range(0, len(self.requests), self.n)
        prompt = sum(len(self.requests[i].prompt_token_ids) for i in first)
        output = sum(self.tokens.values())
        return {
            "prompt_tokens": prompt,
            "completion_tokens": output,
            "total_tokens": prompt + output,
            "prompt_tokens_details": {"cached_tokens": sum(self.cached.get(i, 0) for i in first)},
        }

    def head(self, kind: str) -> dict[str, Any]:
        return {
            "id": self.reply_id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": None,
        }


class ReplyFormat(Protocol):
    """How the choices of one kind of completion look. kind, chunk_kind: the `object` of a reply and of a chunk."""

    kind: str
    chunk_kind: str

    def opening(self, piece: Piece) -> tuple[dict[str, Any] | None, dict[str, Any]]:
        """What is sent of a choice before its first piece, which is given: (the role, or the echoed prompt; fields
        beside `choices`)."""
        ...

    def delta(self, piece: Piece) -> dict[str, Any] | None:
        """One piece as the choice of a chunk; None if there is nothing to send."""
        ...

    def choice(self, result: Result) -> dict[str, Any]: ...

    def extra(self, results: list[Result]) -> dict[str, Any]:
        """Fields beside `choices` in a whole reply."""
        ...


async def whole_reply(http: HttpRequest, job: Job, form: ReplyFormat, pieces: AsyncGenerator[Piece, None]) -> Response:
    """Raises ClientDisconnected when nobody waits any more, and what generation raises."""
    results = [Result(i) for i in range(len(job.requests))]

    async def collect() -> None:
        async with aclosing(pieces):
            async for piece in pieces:
                job.count(piece)
                results[piece.index].add(piece)

    await until_disconnect(http.receive, collect())
    body = job.head(form.kind)
    body["choices"] = [form.choice(result) for result in results]
    body["usage"] = job.usage_body()
    body |= form.extra(results)
    return json_response(body)


async def streamed_reply(
    http: HttpRequest, job: Job, form: ReplyFormat, pieces: AsyncGenerator[Piece, None]
) -> Response:
    """Waits for the first piece, so that what is refused is refused with a status of its own."""
    try:
        first = await until_disconnect(http.receive, anext(pieces))
    except BaseException:
        await pieces.aclose()
        raise
    return EventStream(events(job, form, first, pieces), pieces)


async def events(
    job: Job, form: ReplyFormat, first: Piece, pieces: AsyncGenerator[Piece, None]
) -> AsyncGenerator[bytes, None]:
    """Server-sent events. An error after the first piece becomes an event with `error`; [DONE] ends every stream."""
    head = job.head(form.chunk_kind)
    opened: set[int] = set()

    def event(choice: dict[str, Any] | None, extra: dict[str, Any]) -> bytes:
        if choice is None:
            return b""
        chunk = {**head, "choices": [choice], **extra}
        if job.usage or job.each_usage:
            chunk["usage"] = job.usage_body() if job.each_usage else None
        return sse_event(chunk)

    def data_of(piece: Piece) -> bytes:
        job.count(piece)
        if piece.index in opened:
            return event(form.delta(piece), NO_MORE)
        opened.add(piece.index)
        return event(*form.opening(piece)) + event(form.delta(piece), NO_MORE)

    async with aclosing(pieces):
        try:
            if data := data_of(first):
                yield data
            async for piece in pieces:
                if data := data_of(piece):
                    yield data
            if job.usage:
                yield sse_event({**head, "choices": [], "usage": job.usage_body()})
        except Exception as error:
            told = to_api_error(error, job.request_id)
            if told.status == 500:
                log_failure(logger, error, job.request_id)
            yield sse_event(told.body())
        yield DONE


class EventStream(Response):
    """Sends events as they come. As soon as the client is gone it stops and closes the events and what they are
    made from, whether or not the first event was ever asked for."""

    media_type = "text/event-stream"

    def __init__(self, source: AsyncGenerator[bytes, None], pieces: AsyncGenerator[Piece, None]) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._source = source
        self._pieces = pieces

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def pump() -> None:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            send_body: Send = scope.get(DIRECT_SEND, send)
            async for data in self._source:
                await send_body({"type": "http.response.body", "body": data, "more_body": True})
            await send_body({"type": "http.response.body", "body": b""})

        async with aclosing(self._pieces), aclosing(self._source):
            await until_disconnect(receive, pump())


async def until_disconnect(receive: Receive, work: Awaitable[T]) -> T:
    """The result of `work`, which is cancelled (and awaited) when the client goes away or this is cancelled.
    The request's body must have been read. Raises ClientDisconnected."""
    listener = asyncio.current_task()
    assert listener is not None
    cancelling = listener.cancelling()
    listening, ended, gone = True, False, False

    def on_end(task: asyncio.Future[T]) -> None:
        nonlocal ended
        if listening:
            ended = True
            listener.cancel()

    # The work gets the task, and this one listens: each of its many turns begins at the bottom of a task's stack.
    task = asyncio.ensure_future(work)
    task.add_done_callback(on_end)
    try:
        await _disconnected(receive)
        gone = True
    except asyncio.CancelledError:
        if not ended or listener.uncancel() > cancelling:
            raise  # not on account of on_end
    finally:
        listening = False
        if not ended:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
    if gone and task.cancelled():
        raise ClientDisconnected
    return task.result()


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
