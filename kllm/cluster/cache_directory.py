"""CacheDirectory: what the gateway knows of the instances' caches, from their reports and from what it has routed.

Reports are numbered. After a gap nothing is believed of that instance until its dump has come; a new incarnation begins
empty. Between a routing decision and the report of what was computed for it, the prompt is expected to be where it was
sent: for one to two minutes, or less where so many come that they would not fit, so that a request which never got
there does not draw others for ever.
"""

from __future__ import annotations

import msgspec
import numpy as np

from kllm.cache.block_hash import chain, root_hash
from kllm.cluster.prefix_index import Hashes, Matches, PrefixIndex, Tier, marks, short_hashes
from kllm.messages import CacheChange, CacheDelta, CacheDump, EngineLoad, Hello
from kllm.request import Request

TIERS = {1: Tier.DEVICE, 2: Tier.HOST, 3: Tier.STORE}
EXPECTED_BLOCKS = 1 << 17
EXPECTED_S = 60.0
LEAST_BLOCKS = 1 << 16
REFUSED = 64  # a table that refuses more than one in so many blocks is replaced by one of twice its size
LARGEST = 1 << 24  # blocks: 500 MB


CacheReport = CacheDelta | CacheDump | EngineLoad  # the last for the number of the latest CacheDelta


def prompt_hashes(request: Request, fingerprint: str, block_tokens: int) -> Hashes:
    """Of the prompt's whole blocks. CPU work: a microsecond a block; run it off the loop for long prompts."""
    width = 4 * block_tokens
    raw = np.asarray(request.prompt_token_ids, np.int32).tobytes()
    blocks = (raw[i : i + width] for i in range(0, len(raw) - width + 1, width))
    return short_hashes(chain(root_hash(fingerprint, request.cache_salt, request.adapter), blocks))


class KnownCache(msgspec.Struct, frozen=True, kw_only=True):
    """Of one instance. sequence: of its latest report; None: nothing is believed of it until its dump has come.

    device_blocks, host_blocks: known to be there. gaps, dumps: reports found missing and dumps taken, of all
    incarnations. unreported_blocks: of prompts sent there since it last said anything about its cache: one that
    grows and grows is of an instance whose reports fail to come."""

    sequence: int | None
    device_blocks: int
    host_blocks: int
    gaps: int
    dumps: int
    unreported_blocks: int


class CacheDirectory:
    """instances: number of slots; there may be more later."""

    def __init__(self, instances: int) -> None:
        self._instances = instances
        self._index = PrefixIndex(LEAST_BLOCKS, instances)
        self._capacity = LEAST_BLOCKS
        self._expected = [PrefixIndex(EXPECTED_BLOCKS, instances) for _ in range(2)]
        self._turned_at = 0.0
        self._sequence: list[int | None] = [None] * instances  # of the last report; None: its dump has not come
        self._unasked: set[int] = set()  # of whom nothing is known because the table was replaced
        self._gaps = [0] * instances
        self._dumps = [0] * instances
        self._unreported = [0] * instances

    @property
    def num_blocks(self) -> int:
        return self._index.num_blocks

    def held(self, instance: int, tier: Tier) -> Hashes:
        """Blocks that an instance is known to have, for checks."""
        return self._index.held(instance, tier)

    @property
    def num_gaps(self) -> int:
        return sum(self._gaps)

    @property
    def bytes_used(self) -> int:
        return self._index.bytes_used + sum(expected.bytes_used for expected in self._expected)

    def known(self, instance: int) -> KnownCache:
        """What is known of an instance's cache, and how well."""
        return KnownCache(
            sequence=self._sequence[instance],
            device_blocks=self._index.num_held(instance, Tier.DEVICE),
            host_blocks=self._index.num_held(instance, Tier.HOST),
            gaps=self._gaps[instance],
            dumps=self._dumps[instance],
            unreported_blocks=self._unreported[instance],
        )

    @property
    def num_refused(self) -> int:
        return self._index.num_refused

    # -- instances -------------------------------------------------------------------------------------------

    def joined(self, instance: int, hello: Hello, others: int) -> None:
        """A new incarnation. others: blocks of the instances that are there, this one included."""
        self.grow(instance + 1)
        self.left(instance)
        self._unasked.discard(instance)
        if min(LARGEST, others) > self._capacity:
            self._enlarge(min(LARGEST, others))
            self._unasked.clear()  # the gateway asks all of whom nothing is known

    def _enlarge(self, capacity: int) -> None:
        """A larger table is empty: all have to say again what they have."""
        self._capacity = capacity
        self._index = PrefixIndex(capacity, self._instances)
        self._unasked = {instance for instance, last in enumerate(self._sequence) if last is not None}
        self._sequence = [None] * self._instances

    def grow(self, instances: int) -> None:
        """There are more slots from now on."""
        self._instances = max(self._instances, instances)
        for index in (self._index, *self._expected):
            index.grow(self._instances)
        more = self._instances - len(self._sequence)
        self._sequence += [None] * more
        for counts in (self._gaps, self._dumps, self._unreported):
            counts += [0] * more

    def left(self, instance: int) -> None:
        self._index.leave(instance)
        for expected in self._expected:
            expected.leave(instance)
        self._sequence[instance] = None
        self._unreported[instance] = 0
        self._unasked.discard(instance)

    def knows(self, instance: int) -> bool:
        return self._sequence[instance] is not None

    def heard(self, instance: int, report: CacheReport) -> bool:
        """False if something is missing: the instance must be asked for a dump."""
        last = self._sequence[instance]
        if instance in self._unasked:
            self._unasked.discard(instance)
            return False
        if isinstance(report, EngineLoad):
            return last is None or report.cache_sequence <= last or self._lose(instance)
        if isinstance(report, CacheDump):
            if last is not None and report.sequence < last:
                return True  # late: what came since is newer
            self._index.leave(instance)
            self._sequence[instance] = report.sequence
            self._dumps[instance] += 1
        elif last is None:
            return True  # its dump is on the way
        elif report.sequence <= last:
            return True  # repeated
        elif report.sequence > last + 1:
            return self._lose(instance)
        else:
            self._sequence[instance] = report.sequence
        self._unreported[instance] = 0
        for change in report.changes:
            self._apply(instance, change)
        if self._index.num_refused > self._capacity // REFUSED and self._capacity < LARGEST:
            self._enlarge(min(LARGEST, 2 * self._capacity))
            self._unasked.discard(instance)
            return False
        return True

    def _lose(self, instance: int) -> bool:
        """A report is missing: what was known may be wrong. Always False."""
        self._gaps[instance] += 1
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
        marked = hashes[marks(len(hashes))]
        if now - self._turned_at >= EXPECTED_S or self._expected[0].num_blocks + len(marked) > EXPECTED_BLOCKS:
            self._turned_at = now
            self._expected = [PrefixIndex(EXPECTED_BLOCKS, self._instances), self._expected[0]]
        self._expected[0].stored(instance, marked, Tier.DEVICE)
        self._unreported[instance] += len(hashes)

    def matches(self, hashes: Hashes) -> Matches:
        """In blocks."""
        known = self._index.matches(hashes)
        for expected in self._expected:
            if not expected.num_blocks:
                continue
            l1 = expected.matches(hashes, only_marks=True).l1
            known = Matches(np.maximum(known.l1, l1), np.maximum(known.l2, l1), np.maximum(known.l3, l1))
        return known
