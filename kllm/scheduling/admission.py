"""Admission: which waiting sequences get KV, and that one which does not fit holds up nobody for nothing (F2). Pure."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from kllm.cache.manager import Holding, KVManager
from kllm.scheduling.sequence import Sequence

LOOKAHEAD = 16  # sequences that do not fit, in one step, before the rest of the queue is left for the next step


class Admission:
    """A sequence is admitted if all tokens it has fit beside what those that run still lack of theirs.

    max_overtakes: how often a sequence that does not fit may see a later one admitted. After that room is reserved: of
    those that were overtaken so often, the one that came first is the only one admitted until it is. 0: nobody passes
    one that does not fit. So a sequence that does not fit waits for at most `max_overtakes` later ones to come and go,
    and for those that run.
    """

    def __init__(self, kv: KVManager, max_overtakes: int) -> None:
        self.num_overtakes = 0
        self.reserved: Sequence | None = None
        self._kv = kv
        self._max_overtakes = max_overtakes
        self._blocked: dict[Sequence, None] = {}  # those that did not fit when they were tried last
        self._running: Seq[Sequence] = ()
        self._promised: int | None = None  # blocks that those that run lack; None: not counted yet in this step
        self._refusals = 0
        self._closed = False

    # -- one step --------------------------------------------------------------------------------------------

    def begin(self, running: Seq[Sequence]) -> None:
        """A new step. `running` is the scheduler's own list: it changes as sequences come and go."""
        self._running = running
        self._promised = None
        self._refusals = 0
        self._closed = False
        overtaken = [sequence for sequence in self._blocked if sequence.overtaken >= self._max_overtakes]
        self.reserved = min(overtaken, key=lambda sequence: sequence.arrival, default=None)

    def close(self) -> None:
        """Nobody is admitted in a step in which one that runs lacks room."""
        self._closed = True

    @property
    def is_open(self) -> bool:
        return not self._closed

    def grew(self, sequence: Sequence, blocks: int) -> None:
        """A running sequence got blocks that it was promised. Cheap: called for every sequence of every step."""
        if self._promised is not None:
            holding = sequence.holding
            assert holding is not None
            lacked = self._kv.blocks_for(len(sequence.tokens)) - len(holding.blocks) + blocks
            self._promised += max(1, lacked - blocks) - max(1, lacked)

    def try_open(self, sequence: Sequence) -> tuple[Holding, int] | None:
        """(holding, tokens found in the cache) if the sequence is admitted; None, and nothing changed, if it is not.

        A refusal remembers how much room is needed, so that a blocked sequence is not matched again every step."""
        if self._closed or (self.reserved is not None and sequence is not self.reserved):
            return None
        opened = self._open(sequence)
        if opened is None:
            self._refuse(sequence)
            return None
        self._blocked.pop(sequence, None)
        if sequence is self.reserved:
            self.reserved = None
        for blocked in self._blocked:
            if blocked.arrival < sequence.arrival:
                blocked.overtaken += 1
                self.num_overtakes += 1
        return opened

    def _open(self, sequence: Sequence) -> tuple[Holding, int] | None:
        kv = self._kv
        if self._promised is None:
            self._promised = sum(self._promise(running) for running in self._running)
        if kv.available < sequence.needs + self._promised:
            return None
        before = kv.available
        holding = kv.open(sequence.request.cache_salt, sequence.request.adapter)
        limit = 0 if sequence.wants_prompt_logprobs else len(sequence.tokens) - 1
        matched = kv.match(holding, sequence.tokens, limit)
        lacked = kv.blocks_for(len(sequence.tokens)) - len(holding.blocks)
        if kv.available < lacked + self._promised:
            sequence.needs = lacked + before - kv.available
            kv.close(holding)
            return None
        sequence.needs = 0
        self._promised += max(1, lacked)
        return holding, matched

    def _promise(self, sequence: Sequence) -> int:
        """Blocks that a running sequence lacks for the tokens it has, or one to grow."""
        assert sequence.holding is not None
        return max(1, self._kv.blocks_for(len(sequence.tokens)) - len(sequence.holding.blocks))

    def _refuse(self, sequence: Sequence) -> None:
        self._blocked[sequence] = None
        self._refusals += 1
        if self._max_overtakes == 0 or self._refusals >= LOOKAHEAD:
            self._closed = True

    # -- going -----------------------------------------------------------------------------------------------

    def forget(self, sequence: Sequence) -> None:
        """It has ended."""
        self._blocked.pop(sequence, None)
        if self.reserved is sequence:
            self.reserved = None

    @property
    def blocked(self) -> int:
        """Waiting sequences that did not fit when they were tried last."""
        return len(self._blocked)
