"""One accepted request: what its client has been given, and the iterator it reads from.

Whatever happens to instances, the client's deltas carry each output token once and in order, and one end.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from enum import Enum, auto
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from kllm.cluster.prefix_index import Hashes
from kllm.messages import KvSource
from kllm.request import Delta, Request

if TYPE_CHECKING:
    from kllm.cluster.slot import Slot

PROOF_TOKENS = 8  # an attempt that yields this many tokens proves that the request does not kill its instance


class Gap(Exception):
    """A delta starts beyond the tokens received so far: something between was lost."""


class End(Enum):
    COMPLETED = auto()
    ERROR = auto()
    ABORT = auto()


class HeldKv(NamedTuple):
    """KV of a request that waits to be taken: at the instance of this slot, in its incarnation of then."""

    source: KvSource | None
    slot: Slot
    incarnation: str

    @property
    def tokens(self) -> int:
        """That it is of, while that instance is there: its blocks are of its own size."""
        hello = self.slot.hello
        return 0 if self.source is None or hello is None else len(self.source.slots) * hello.block_tokens


class RequestStream:
    """An AsyncIterator[Delta]; read it to its end or `aclose()` it. Cancelling a read closes it too. Reading raises
    Unavailable in the end if instances were there, and all of them too busy for it.

    Deltas that wait for a slow reader are merged into one. The client's view hides restarts: num_cached_tokens,
    timings and prompt_logprobs are those of the attempt that yielded the first token.

    attempt: the current one; the first is `first_attempt`. outputs: tokens accepted so far, read by the client or not.
    strikes: attempts in a row that died with their instance before proving themselves.
    losses: attempts in a row whose messages were lost, or which an instance gave back, before any token came.
    refusals: attempts since the latest token or death that instances were too busy for. given_back_by: the slot whose
    instance gave back the last attempt.
    trusted: it has proven itself since the last death that it saw.
    hashes: of the prompt's blocks, where the gateway routes by them.
    kv: it is prefilled, and this has not been taken over yet. silent: the current attempt has yielded nothing.
    """

    def __init__(
        self,
        request: Request,
        on_close: Callable[[RequestStream], None],
        *,
        first_attempt: int = 0,
        hashes: Hashes | None = None,
    ) -> None:
        self.request = request
        self.hashes = hashes
        self.attempt = first_attempt
        self.strikes = 0
        self.losses = 0
        self.refusals = 0
        self.given_back_by: Slot | None = None
        self.outputs: list[int] = []
        self.end: End | None = None
        self.kv: HeldKv | None = None
        self.silent = True
        self._first_attempt = first_attempt
        self._on_close = on_close
        self._attempt_start = 0  # len(outputs) when the current attempt began
        self._proof_taken = False
        self._trusted = False
        self._num_cached_tokens = 0
        self._counted = first_attempt  # the attempt that they are of
        self._has_prompt_logprobs = False
        self._unavailable: Exception | None = None  # to be raised behind what is unread
        self._unread: list[Delta] = []  # the first one, and those after it that are more than tokens
        self._waiter: asyncio.Future[None] | None = None  # of a read
        self._end_waiter: asyncio.Future[None] | None = None

    # --- the gateway's side ---

    @property
    def attempts(self) -> int:
        """How many there have been, the current one included."""
        return self.attempt - self._first_attempt + 1

    @property
    def request_to_submit(self) -> Request:
        """The request without what an earlier attempt has already delivered."""
        if not self._has_prompt_logprobs:
            return self.request
        params = msgspec.structs.replace(self.request.params, prompt_logprobs=None)
        return msgspec.structs.replace(self.request, params=params)

    @property
    def needs_resuming(self) -> bool:
        """Only an instance that resumes can go on with it: the grammar's state is in its outputs."""
        return bool(self.outputs) and self.request.params.structured_outputs is not None

    @property
    def proven(self) -> bool:
        """The current attempt has yielded enough tokens."""
        return len(self.outputs) - self._attempt_start >= PROOF_TOKENS

    @property
    def trusted(self) -> bool:
        return self._trusted or self.proven

    def takes_proof(self) -> bool:
        """True once in an attempt: when it is found proven."""
        if self._proof_taken or not self.proven:
            return False
        self._proof_taken = True
        return True

    def next_attempt(self, *, died: bool = True, refused: bool = False) -> None:
        """The current attempt is lost, with its instance or (died=False) on the way. What it still sends is dropped.

        refused: its instance was too busy for it."""
        if self.proven:
            self.strikes, self._trusted = 0, True
        elif died:
            self.strikes, self._trusted = self.strikes + 1, False
        got_on = died or len(self.outputs) > self._attempt_start
        self.losses = 0 if got_on else self.losses + (not refused)
        self.refusals = 0 if got_on else self.refusals + refused
        self.given_back_by = None
        self.attempt += 1
        self.silent = True
        self._proof_taken = False
        self._attempt_start = len(self.outputs)

    def hand_over(self, kv: HeldKv) -> None:
        """The current attempt has done its part, the prefill; the next one goes on, elsewhere."""
        self.kv = kv
        self.attempt += 1
        self.silent = True
        self._attempt_start = len(self.outputs)

    def accept(self, delta: Delta) -> bool:
        """Take what is new in a delta of the current attempt; False if nothing is. Raises Gap."""
        if self.end is not None or delta.attempt != self.attempt:
            return False
        outputs = self.outputs
        if (
            delta.index == len(outputs)
            and outputs
            and delta.token_ids
            and delta.finish_reason is None
            and delta.num_cached_tokens == self._num_cached_tokens
            and delta.timings is None
            and delta.prompt_logprobs is None
        ):  # nearly every token: nothing to change
            outputs += delta.token_ids
            if not self._unread or delta.logprobs is not None:
                self._unread.append(delta)
                self._wake()
            return True
        return self._accept_part(delta)

    def _accept_part(self, delta: Delta) -> bool:
        known = len(self.outputs)
        if delta.index > known:
            raise Gap(f"request {self.request.request_id}: a delta at token {delta.index} follows token {known}")
        repeated = known - delta.index
        tokens = delta.token_ids[repeated:]
        prompt_logprobs = None if self._has_prompt_logprobs else delta.prompt_logprobs
        if not tokens and delta.finish_reason is None and prompt_logprobs is None:
            return False
        if known == 0:
            self._num_cached_tokens, self._counted = delta.num_cached_tokens, delta.attempt
        elif delta.attempt == self._counted:  # some engines say it only at the end
            self._num_cached_tokens = max(self._num_cached_tokens, delta.num_cached_tokens)
        self._push(
            msgspec.structs.replace(
                delta,
                index=known,
                token_ids=tokens,
                logprobs=None if delta.logprobs is None else delta.logprobs[repeated:],
                prompt_logprobs=prompt_logprobs,
                num_cached_tokens=self._num_cached_tokens,
                timings=delta.timings if known == 0 else None,
            )
        )
        return True

    def fail(self, error: str) -> None:
        self._finish(Delta(request_id=self.request.request_id, finish_reason="error", error=error))

    def refuse(self, why: Exception) -> None:
        """End without a result, and not by a fault: whoever reads is raised this."""
        assert self.end is None, "a request ends once"
        self.end, self._unavailable = End.ERROR, why
        self._wake()

    def abort(self) -> None:
        """End on the gateway's initiative; the client sees finish_reason abort."""
        self._finish(Delta(request_id=self.request.request_id, finish_reason="abort"))

    def _finish(self, delta: Delta) -> None:
        self._push(
            msgspec.structs.replace(
                delta, attempt=self.attempt, index=len(self.outputs), num_cached_tokens=self._num_cached_tokens
            )
        )

    def _push(self, delta: Delta) -> None:
        assert self.end is None, "a request ends once"
        self.outputs += delta.token_ids
        self._has_prompt_logprobs = self._has_prompt_logprobs or delta.prompt_logprobs is not None
        if delta.finish_reason is not None:
            self.end = {"error": End.ERROR, "abort": End.ABORT}.get(delta.finish_reason, End.COMPLETED)
        self._unread.append(delta)
        self._wake()

    # --- the client's side ---

    def __aiter__(self) -> RequestStream:
        return self

    async def __anext__(self) -> Delta:
        while not self._unread:
            if self.end is not None:
                error, self._unavailable = self._unavailable, None
                raise error or StopAsyncIteration
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            except asyncio.CancelledError:
                await self.aclose()
                raise
            finally:
                self._waiter = None
        unread, self._unread = self._unread, []
        return self._merge(unread)

    def _merge(self, unread: list[Delta]) -> Delta:
        """What waits, as one delta: `unread` lacks those between that are tokens and nothing else."""
        first, last = unread[0], unread[-1]
        if last is first and first.index + len(first.token_ids) == len(self.outputs):
            return first
        with_logprobs = any(delta.logprobs is not None for delta in unread)
        return msgspec.structs.replace(
            last,
            index=first.index,
            token_ids=self.outputs[first.index :],
            logprobs=[entry for delta in unread for entry in delta.logprobs or ()] if with_logprobs else None,
            prompt_logprobs=next((d.prompt_logprobs for d in unread if d.prompt_logprobs is not None), None),
            timings=next((delta.timings for delta in unread if delta.timings is not None), None),
        )

    async def wait_ended(self) -> None:
        """Waits for the end without reading; what came until then is read afterwards, as one delta.

        Not woken by tokens. Only one task may wait. Cancelling it closes the stream, as with a read."""
        if self.end is not None:
            return
        self._end_waiter = asyncio.get_running_loop().create_future()
        try:
            await self._end_waiter
        except asyncio.CancelledError:
            await self.aclose()
            raise
        finally:
            self._end_waiter = None

    async def aclose(self) -> None:
        """The client goes away: if the request still runs it is aborted, before this returns. Idempotent."""
        self._unread, self._unavailable = [], None
        if self.end is None:
            self.end = End.ABORT
            self._on_close(self)
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
        if self._end_waiter is not None and self.end is not None and not self._end_waiter.done():
            self._end_waiter.set_result(None)
