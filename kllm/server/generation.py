"""Running the sequences of one API request: gateway deltas to pieces of text, several sequences as one stream.

Request 0 ─► gateway.generate ─► deltas ─► Detokenizer ─► Piece(0) ─┐
Request 1 ─► ...                                          Piece(1) ─┴─► one stream, in order of arrival
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field

from kllm.cluster.admission import Unavailable
from kllm.cluster.cache_directory import prompt_hashes
from kllm.cluster.gateway import Gateway
from kllm.cluster.prefix_index import Hashes
from kllm.request import Delta, FinishReason, InvalidRequest, Request, TokenLogprobs
from kllm.server.errors import GenerationFailed, unavailable
from kllm.telemetry.metrics import Metrics, RequestMetrics
from kllm.tokenization.detokenizer import Detokenizer
from kllm.tokenization.tokenizer import Tokenizer


@dataclass(slots=True)
class Piece:
    """New output of one sequence. `index` is the choice's number; the last piece has a finish_reason."""

    index: int
    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    num_cached_tokens: int = 0
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None


@dataclass(slots=True)
class Result:
    """All pieces of one sequence."""

    index: int
    texts: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    num_cached_tokens: int = 0
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None

    def add(self, piece: Piece) -> None:
        self.texts.append(piece.text)
        self.token_ids += piece.token_ids
        self.logprobs += piece.logprobs or ()
        self.prompt_logprobs = piece.prompt_logprobs or self.prompt_logprobs
        self.num_cached_tokens = piece.num_cached_tokens
        self.finish_reason = piece.finish_reason
        self.stop_reason = piece.stop_reason

    @property
    def text(self) -> str:
        return "".join(self.texts)


class Sequencer:
    """Turns one sequence's deltas into pieces and keeps its metrics."""

    def __init__(self, index: int, request: Request, tokenizer: Tokenizer, metrics: RequestMetrics) -> None:
        self.index = index
        self._detokenizer = Detokenizer(tokenizer, request.params, request.prompt_token_ids)
        self._eos = tokenizer.eos_token_ids
        self._metrics = metrics

    def piece(self, delta: Delta, now: float) -> Piece:
        """Raises InvalidRequest, GenerationFailed or ApiError if the delta says that generation failed."""
        reason = delta.finish_reason
        if reason == "error":
            error = delta.error or "the instance reported an error"
            raise InvalidRequest(error) if delta.invalid else GenerationFailed(error)
        if reason == "abort":
            raise unavailable("The request was ended because the server is shutting down.", code="shutting_down")
        ids = delta.token_ids
        ending = reason == "stop" and bool(ids) and (ids[-1] in self._eos or ids[-1] == delta.stop_reason)
        added = self._detokenizer.push(ids, finished=reason is not None, stop_token=ending)
        kept = added.num_tokens_kept
        self._metrics.tokens(kept, now)
        if delta.timings is not None:
            self._metrics.timings(delta.timings.queue_s, delta.timings.prefill_s)
        if added.stop is not None:
            reason = "stop"
        return Piece(
            self.index,
            added.text,
            ids if kept == len(ids) else ids[:kept],
            None if delta.logprobs is None else delta.logprobs[:kept],
            delta.prompt_logprobs,
            delta.num_cached_tokens,
            reason,
            added.stop if added.stop is not None else delta.stop_reason,
        )

    def end(self, reason: str, now: float) -> None:
        self._metrics.end(reason, now)


FEW_TOKENS = 4096  # hashed on the loop in a quarter of a millisecond


async def _hashes(gateway: Gateway, request: Request) -> Hashes | None:
    """Names of the prompt's blocks, if the gateway routes by them; of long prompts off the loop."""
    naming = gateway.block_naming
    if naming is None:
        return None
    if len(request.prompt_token_ids) <= FEW_TOKENS:
        return prompt_hashes(request, *naming)
    return await asyncio.to_thread(prompt_hashes, request, *naming)


async def generate(
    gateway: Gateway, tokenizer: Tokenizer, metrics: Metrics, requests: Sequence[Request], arrival: float
) -> AsyncGenerator[Piece, None]:
    """Pieces of all requests as they come. All are submitted before the first piece is awaited, or none is.

    Closing the generator aborts what still runs. Raises InvalidRequest, QueueFull, Unavailable, GenerationFailed.
    """
    streams: list[AsyncIterator[Delta]] = []
    sequences = [
        Sequencer(i, request, tokenizer, metrics.request(len(request.prompt_token_ids), arrival))
        for i, request in enumerate(requests)
    ]
    try:
        if len(requests) > 1:  # not one after the other until the last finds no room, and all are given up
            gateway.check_room(len(requests), requests[0].priority)
        named = [await _hashes(gateway, request) for request in requests]
        for request, hashes in zip(requests, named, strict=True):
            streams.append(gateway.generate(request, hashes))
        pieces = [_pieces(sequence, stream) for sequence, stream in zip(sequences, streams, strict=True)]
        async with aclosing(pieces[0] if len(pieces) == 1 else _merged(pieces)) as merged:
            async for piece in merged:
                yield piece
    finally:
        for stream in streams:
            await _close(stream)


async def _close(stream: AsyncIterator[Delta]) -> None:
    close = getattr(stream, "aclose", None)
    if close is not None:
        await close()


async def _pieces(sequence: Sequencer, stream: AsyncIterator[Delta]) -> AsyncGenerator[Piece, None]:
    """Ends with the piece that has a finish_reason. A stop string ends the sequence here, before the instance knows:
    leaving the stream aborts it there."""
    clock = asyncio.get_running_loop().time
    reason = "abort"
    try:
        async for delta in stream:
            piece = sequence.piece(delta, clock())
            if piece.finish_reason is not None:
                reason = piece.finish_reason
                await _close(stream)
                sequence.end(reason, clock())
                yield piece
                return
            yield piece
        raise GenerationFailed("the stream ended without a finish reason")
    except (GenerationFailed, InvalidRequest, Unavailable):
        reason = "error"
        raise
    finally:
        sequence.end(reason, clock())


async def _merged(sources: Sequence[AsyncGenerator[Piece, None]]) -> AsyncGenerator[Piece, None]:
    """Pieces of all sources in order of arrival. The first error ends everything."""
    queue: asyncio.Queue[Piece | Exception | None] = asyncio.Queue(maxsize=4 * len(sources))

    async def pump(source: AsyncGenerator[Piece, None]) -> None:
        try:
            async with aclosing(source):
                async for piece in source:
                    await queue.put(piece)
        except Exception as error:
            await queue.put(error)
        else:
            await queue.put(None)

    tasks = [asyncio.create_task(pump(source)) for source in sources]
    try:
        running = len(tasks)
        while running:
            item = await queue.get()
            if item is None:
                running -= 1
            elif isinstance(item, Exception):
                raise item
            else:
                yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
