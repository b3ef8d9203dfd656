"""CacheDirectory: what the gateway knows of the instances' caches, from their reports and from what it has routed.

Reports are numbered. After a gap nothing is believed of that instance until its dump has come; a new incarnation begins
empty. Between a routing decision and the report of what was computed for it, the prompt is expected to be where it was
sent: for one to two minutes, so that a request which never got there does not draw others for ever.
"""

from __future__ import annotations

import numpy as np

from kllm.cache.block_hash import chain, root_hash
from kllm.cluster.prefix_index import Hashes, Matches, PrefixIndex, Tier, short_hashes
from kllm.messages import CacheChange, CacheDelta, CacheDump, EngineLoad, Hello
from kllm.request import Request

TIERS = {1: Tier.DEVICE, 2: Tier.HOST, 3: Tier.STORE}
EXPECTED_BLOCKS = 1 << 17
EXPECTED_S = 60.0
LEAST_BLOCKS = 1 << 16
LARGEST = 1 << 24  # blocks: 500 MB


CacheReport = CacheDelta | CacheDump | EngineLoad  # the last for the number of the latest CacheDelta


def prompt_hashes(request: Request, fingerprint: str, block_tokens: int) -> Hashes:
    """Of the prompt's whole blocks. CPU work: a microsecond a block; run it off the loop for long prompts."""
    width = 4 * block_tokens
    raw = np.asarray(request.prompt_token_ids, np.int32).tobytes()
    blocks = (raw[i : i + width] for i in range(0, len(raw) - width + 1, width))
    return short_hashes(chain(root_hash(fingerprint, request.cache_salt, request.adapter), blocks))


class CacheDirectory:
    """instances: number of slots; there may be more later."""

    def __init__(self, instances: int) -> None:
        self._instances = instances
        self._index = PrefixIndex(LEAST_BLOCKS, instances)
        self._capacity = LEAST_BLOCKS
        self._expected = [PrefixIndex(EXPECTED_BLOCKS, instances) for _ in range(2)]
        self._turned_at = 0.0
        self._sequence: list[int | None] = [None] * instances  # of the last report; None: its dump has not come
        self.num_gaps = 0

    @property
    def num_blocks(self) -> int:
        return self._index.num_blocks

    def held(self, instance: int, tier: Tier) -> Hashes:
        """Blocks that an instance is known to have, for checks."""
        return self._index.held(instance, tier)

    @property
    def num_refused(self) -> int:
        return self._index.num_refused

    # -- instances -------------------------------------------------------------------------------------------

    def joined(self, instance: int, hello: Hello, others: int) -> None:
        """A new incarnation. others: blocks of the instances that are there, this one included."""
        self.grow(instance + 1)
        self.left(instance)
        wanted = min(LARGEST, 2 * others)
        if wanted > self._capacity:  # a larger table is empty: all are asked again
            self._capacity = wanted
            self._index = PrefixIndex(wanted, self._instances)
            self._sequence = [None] * self._instances

    def grow(self, instances: int) -> None:
        """There are more slots from now on."""
        self._instances = max(self._instances, instances)
        for index in (self._index, *self._expected):
            index.grow(self._instances)
        self._sequence += [None] * (self._instances - len(self._sequence))

    def left(self, instance: int) -> None:
        self._index.leave(instance)
        for expected in self._expected:
            expected.leave(instance)
        self._sequence[instance] = None

    def knows(self, instance: int) -> bool:
        return self._sequence[instance] is not None

    def heard(self, instance: int, report: CacheReport) -> bool:
        """False if something is missing: the instance must be asked for a dump."""
        last = self._sequence[instance]
        if isinstance(report, EngineLoad):
            return last is None or report.cache_sequence <= last or self._lose(instance)
        if isinstance(report, CacheDump):
            if last is not None and report.sequence < last:
                return True  # late: what came since is newer
            self._index.leave(instance)
            self._sequence[instance] = report.sequence
        elif last is None:
            return True  # its dump is on the way
        elif report.sequence <= last:
            return True  # repeated
        elif report.sequence > last + 1:
            return self._lose(instance)
        else:
            self._sequence[instance] = report.sequence
        for change in report.changes:
            self._apply(instance, change)
        return True

    def _lose(self, instance: int) -> bool:
        """A report is missing: what was known may be wrong. Always False."""
        self.num_gaps += 1
        self._index.leave(instance)
        self._sequence[instance] = None
        return False

    def _apply(self, instance: int, change: CacheChange) -> None:
        tier = TIERS.get(change.tier)
        if tier is None:
            return  # of a newer version
        if not change.hashes:
            if not change.stored:
                self._index.clear(instance, tier)
            return
        hashes = np.frombuffer(change.hashes[: len(change.hashes) // 8 * 8], ">u8").astype(np.uint64)
        hashes = np.maximum(hashes, np.uint64(1))
        if change.stored:
            self._index.stored(instance, hashes, tier)
        else:
            self._index.removed(instance, hashes, tier)

    # -- requests --------------------------------------------------------------------------------------------

    def routed(self, instance: int, hashes: Hashes, now: float) -> None:
        """A prompt was sent there. now: the loop's time."""
        if now - self._turned_at >= EXPECTED_S:
            self._turned_at = now
            self._expected = [PrefixIndex(EXPECTED_BLOCKS, self._instances), self._expected[0]]
        self._expected[0].stored(instance, hashes, Tier.DEVICE)

    def matches(self, hashes: Hashes) -> Matches:
        """In blocks."""
        known = self._index.matches(hashes)
        for expected in self._expected:
            l1 = expected.matches(hashes).l1
            known = Matches(np.maximum(known.l1, l1), np.maximum(known.l2, l1), np.maximum(known.l3, l1))
        return known
