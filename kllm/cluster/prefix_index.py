"""PrefixIndex: which instance holds which blocks, in which tier, as far as the gateway knows. Pure.

A hash table in flat arrays: buckets of 8 places, each with 64 bits of a block's hash, a mask of the instances whose
device has it, a mask of those whose host memory has it, and whether the shared store has it: 25 bytes a place, however
many instances hold the block, and 16 more for each further 64 instances. A question about a whole prompt is a few array
operations.

    key     uint64 [buckets, 8]           0: free
    device  uint64 [groups][buckets, 8]   bit i of group g: instance 64 g + i
    host    uint64 [groups][buckets, 8]
    store   bool   [buckets, 8]

Of a long prompt not every block is looked up. Caches give up the end of a prefix before its beginning, so whoever has a
block has those before it: beyond the first 128 blocks, one in 16 is looked at (marks), and then, for each instance, the
blocks between the last mark that it has and the next. Where a cache has a hole between two marks, it is not seen.

The size is fixed: what does not fit is not known, which costs a hit at most, and is counted. 64 bits are enough here: a
mistaken match misroutes a request, it never mixes KV (instances compare tokens).
"""

from __future__ import annotations

import math
from enum import Enum
from typing import TypeVar

import numpy as np
import numpy.typing as npt

WAYS = 8
GROUP = 64  # instances whose bits share a word
MOST_INSTANCES = 256
FULL = 0.82  # of all places: beyond this, new blocks wait for others to go
SPILL = 16  # buckets in a row that a key may be in
SCANNED = 1 << 16  # places looked through at once
FINE = 128  # blocks of a prompt that are all looked at
STRIDE = 16  # beyond those, one in so many is

Hashes = npt.NDArray[np.uint64]
Masks = npt.NDArray[np.uint64]
Number = TypeVar("Number", np.uint64, np.int64)


class Tier(Enum):
    DEVICE = 0
    HOST = 1
    STORE = 2


class Matches:
    """Of one prompt, per instance: leading blocks that its device has (l1), that its device or host memory has (l2),
    and that those or the store have (l3). int64 [instances] each."""

    __slots__ = ("l1", "l2", "l3")

    def __init__(self, l1: npt.NDArray[np.int64], l2: npt.NDArray[np.int64], l3: npt.NDArray[np.int64]) -> None:
        self.l1, self.l2, self.l3 = l1, l2, l3


def _distinct(values: npt.NDArray[Number]) -> npt.NDArray[Number]:
    """Each value once, in order; several times as quick as np.unique for numbers that are all over the place."""
    ordered = np.sort(values)
    first = np.ones(len(ordered), np.bool_)
    first[1:] = ordered[1:] != ordered[:-1]
    return ordered[first]


def _turns(ordered: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """0, 1, … within each run of equal numbers."""
    first = np.ones(len(ordered), np.bool_)
    first[1:] = ordered[1:] != ordered[:-1]
    starts = np.flatnonzero(first)
    turns: npt.NDArray[np.int64] = np.arange(len(ordered)) - np.repeat(starts, np.diff(starts, append=len(ordered)))
    return turns


def short_hashes(hashes: list[bytes]) -> Hashes:
    """The 64 bits that cache events carry of a block's hash: its last 8 bytes, big-endian. 0 becomes 1."""
    raw = np.frombuffer(b"".join(block_hash[-8:] for block_hash in hashes), dtype=">u8").astype(np.uint64)
    return np.maximum(raw, np.uint64(1))


def marks(blocks: int) -> npt.NDArray[np.int64]:
    """Which of so many blocks of a prompt are always looked at; the same ones of every prompt."""
    fine = np.arange(min(blocks, FINE))
    return np.concatenate((fine, np.arange(FINE + STRIDE - 1, blocks, STRIDE))) if blocks > FINE else fine


class PrefixIndex:
    """blocks: most that are known at once. instances: numbered from 0; at most 256."""

    def __init__(self, blocks: int, instances: int) -> None:
        if not 1 <= instances <= MOST_INSTANCES:
            raise ValueError(f"an index is for 1 to {MOST_INSTANCES} instances, not {instances}")
        self._instances = 0
        self._buckets = max(SPILL, math.ceil(blocks / (WAYS * FULL)))
        self._key = np.zeros((self._buckets, WAYS), np.uint64)
        self._device: list[npt.NDArray[np.uint64]] = []
        self._host: list[npt.NDArray[np.uint64]] = []
        self._store = np.zeros((self._buckets, WAYS), np.bool_)
        self._has_store = False
        self._deepest = 0  # buckets beyond its own that any key has been put in
        self.num_blocks = 0
        self.num_refused = 0  # blocks that did not fit
        self._num_held: dict[Tier, list[int]] = {Tier.DEVICE: [], Tier.HOST: []}
        self.grow(instances)

    def grow(self, instances: int) -> None:
        """There are more instances from now on. Raises ValueError for too many."""
        if instances > MOST_INSTANCES:
            raise ValueError(f"an index is for at most {MOST_INSTANCES} instances, not {instances}")
        self._instances = max(self._instances, instances)
        while len(self._device) * GROUP < instances:
            self._device.append(np.zeros((self._buckets, WAYS), np.uint64))
            self._host.append(np.zeros((self._buckets, WAYS), np.uint64))
        for counts in self._num_held.values():
            counts += [0] * (self._instances - len(counts))

    @property
    def bytes_used(self) -> int:
        """Of all arrays."""
        return sum(array.nbytes for array in (self._key, *self._device, *self._host, self._store))

    # -- what instances say ----------------------------------------------------------------------------------

    def stored(self, instance: int, hashes: Hashes, tier: Tier) -> None:
        places = self._find(hashes)
        absent = places < 0
        if absent.any():
            places = np.concatenate((places[~absent], self._add(_distinct(hashes[absent]))))
        if tier is Tier.STORE:
            self._has_store = True
            self._store.reshape(-1)[places] = True
        else:
            mask, bit = self._mask(instance, tier), _bit(instance)
            self._num_held[tier][instance] += len(_distinct(places[mask[places] & bit == 0]))
            mask[places] |= bit

    def removed(self, instance: int, hashes: Hashes, tier: Tier) -> None:
        places = self._find(hashes)
        places = places[places >= 0]
        if tier is Tier.STORE:
            self._store.reshape(-1)[places] = False
        else:
            mask, bit = self._mask(instance, tier), _bit(instance)
            self._num_held[tier][instance] -= len(_distinct(places[mask[places] & bit != 0]))
            mask[places] &= ~bit
        self._free(_distinct(places))

    def clear(self, instance: int, tier: Tier) -> None:
        """The instance has nothing in this tier any more; or nobody, if it is the store."""
        if tier is not Tier.STORE:
            self._free(self._drop_all(instance, tier))
            return
        places = np.flatnonzero(self._store)
        self._store[:] = False
        self._has_store = False
        self._free(places)

    def leave(self, instance: int) -> None:
        """Nothing is known of this instance any more (it left, or what it says has a gap)."""
        dropped = [self._drop_all(instance, tier) for tier in (Tier.DEVICE, Tier.HOST)]
        self._free(_distinct(np.concatenate(dropped)))

    def _drop_all(self, instance: int, tier: Tier) -> npt.NDArray[np.int64]:
        """The places, each once, where it was. The whole table is looked through, in parts that fit into a cache."""
        if not self._num_held[tier][instance]:
            return np.empty(0, np.int64)
        mask, bit = self._mask(instance, tier), _bit(instance)
        places = [start + np.flatnonzero(mask[start : start + SCANNED] & bit) for start in range(0, len(mask), SCANNED)]
        dropped = np.concatenate(places)
        mask[dropped] &= ~bit
        self._num_held[tier][instance] = 0
        return dropped

    def _mask(self, instance: int, tier: Tier) -> npt.NDArray[np.uint64]:
        """Of the instance's group."""
        return (self._device if tier is Tier.DEVICE else self._host)[instance // GROUP].reshape(-1)

    # -- places ----------------------------------------------------------------------------------------------

    def _find(self, hashes: Hashes) -> npt.NDArray[np.int64]:
        """Place of each hash; -1 where it is not known."""
        places = np.full(len(hashes), -1, np.int64)
        left: npt.NDArray[np.int64] | None = None  # positions not found yet; None: all
        bucket = (hashes % np.uint64(self._buckets)).astype(np.int64)
        for _ in range(self._deepest + 1):
            wanted = hashes if left is None else hashes[left]
            found = np.flatnonzero(self._key.take(bucket, axis=0) == wanted[:, None])  # a key is in one place at most
            at, way = found // WAYS, found % WAYS
            places[at if left is None else left[at]] = bucket[at] * WAYS + way
            if len(at) == len(bucket):
                break
            missing = np.ones(len(bucket), np.bool_)
            missing[at] = False
            left = np.flatnonzero(missing) if left is None else left[missing]
            bucket = bucket[missing] + 1
            bucket[bucket == self._buckets] = 0
        return places

    def _add(self, hashes: Hashes) -> npt.NDArray[np.int64]:
        """Places for hashes that are not known, each once; those that find none are left out."""
        room = int(FULL * self._key.size) - self.num_blocks
        self.num_refused += max(0, len(hashes) - room)
        left = hashes[: max(0, room)]
        key = self._key.reshape(-1)
        taken: list[npt.NDArray[np.int64]] = []
        home = (left % np.uint64(self._buckets)).astype(np.int64)
        order = np.argsort(home)
        left, home = left[order], home[order]
        for spill in range(SPILL):
            if not len(left):
                break
            turn = _turns(home)  # of several that come to one bucket each gets a free place of its own
            bucket = home + spill
            bucket[bucket >= self._buckets] -= self._buckets
            free = self._key[bucket] == 0
            count = free.cumsum(axis=1)
            fits = turn < count[:, -1]
            way = (free & (count == turn[:, None] + 1)).argmax(axis=1)
            places = (bucket * WAYS + way)[fits]
            if len(places):
                key[places] = left[fits]
                self._deepest = max(self._deepest, spill)
                taken.append(places)
            left, home = left[~fits], home[~fits]
        self.num_refused += len(left)
        added = np.concatenate(taken) if taken else np.empty(0, np.int64)
        self.num_blocks += len(added)
        return added

    def _free(self, places: npt.NDArray[np.int64]) -> None:
        """Give up those of these places (each once) that nobody holds."""
        kept = self._store.reshape(-1)[places]
        for mask in (*self._device, *self._host):
            kept = kept | (mask.reshape(-1)[places] != 0)
        gone = places[~kept]
        self._key.reshape(-1)[gone] = 0
        self.num_blocks -= len(gone)

    def num_held(self, instance: int, tier: Tier) -> int:
        """Blocks that are known of this instance in a tier of its own, device or host."""
        return self._num_held[tier][instance]

    def held(self, instance: int, tier: Tier) -> Hashes:
        """All that is known of this instance in this tier, for checks."""
        if tier is Tier.STORE:
            held = self._store.reshape(-1)
        else:
            held = (self._mask(instance, tier) & _bit(instance)) != 0
        hashes: Hashes = self._key.reshape(-1)[held]
        return hashes

    # -- what a router asks ----------------------------------------------------------------------------------

    def matches(self, hashes: Hashes, *, only_marks: bool = False) -> Matches:
        """hashes: of a prompt's blocks, in order. only_marks: of none but those was it told."""
        places = self._find_leading(hashes[marks(len(hashes))])
        found = np.zeros((3, len(self._device), GROUP), np.int64)
        for group in range(len(self._device)):
            l1, l2, l3 = self._masks(group, places)
            found[:, group] = leading = _leading(l1)
            if l3 is not l1:
                found[1, group] = found[2, group] = leading if l2 is l1 else _leading(l2)
            if l3 is not l2:
                found[2, group] = _leading(l3)
        found += (STRIDE - 1) * np.maximum(found - FINE, 0)  # marks to blocks
        if not only_marks:
            self._refine(hashes, found)
        return Matches(*found.reshape(3, -1)[:, : self._instances])

    def _masks(self, group: int, places: npt.NDArray[np.int64]) -> tuple[Masks, Masks, Masks]:
        """Who of a group has what lies at these places on its device, in host memory as well, in the store as well.
        Each array is a cache miss a place: nothing is read of tiers that hold nothing; it is the same array then."""
        device = local = every = self._device[group].reshape(-1)[places]
        if any(self._num_held[Tier.HOST]):
            local = every = device | self._host[group].reshape(-1)[places]
        if self._has_store:
            every = np.where(self._store.reshape(-1)[places], ~np.uint64(0), local)
        return device, local, every

    def _refine(self, hashes: Hashes, found: npt.NDArray[np.int64]) -> None:
        """found [tier, group, instance]: blocks up to a mark that is held; adds those up to the next."""
        ends_here = (found >= FINE) & (found < len(hashes))
        starts = _distinct(found[ends_here])
        if not len(starts):
            return
        blocks = starts[:, None] + np.arange(STRIDE - 1)  # a row for each stretch in which something ends
        places = self._find(hashes[np.minimum(blocks, len(hashes) - 1)].reshape(-1)).reshape(blocks.shape)
        known = (blocks < len(hashes)) & (places >= 0)
        instance = np.arange(GROUP, dtype=np.uint64)[:, None]
        for group in range(len(self._device)):
            for tier, masks in enumerate(self._masks(group, places)):
                held = np.bitwise_and.accumulate(np.where(known, masks, np.uint64(0)), axis=1)
                row = np.searchsorted(starts[:-1], found[tier, group])
                more = (held[row] >> instance & np.uint64(1)).sum(axis=1, dtype=np.int64)
                found[tier, group] += np.where(ends_here[tier, group], more, 0)

    def _find_leading(self, hashes: Hashes) -> npt.NDArray[np.int64]:
        """Places up to the first hash that is not known, in windows that grow: most prompts end early."""
        found: list[npt.NDArray[np.int64]] = []
        start, window = 0, 64
        while start < len(hashes):
            places = self._find(hashes[start : start + window])
            known = places >= 0
            if not known.all():
                found.append(places[: int(known.argmin())])
                break
            found.append(places)
            start, window = start + window, 16 * window
        return np.concatenate(found) if found else np.empty(0, np.int64)


def _bit(instance: int) -> np.uint64:
    return np.uint64(1 << instance % GROUP)


def _leading(masks: Masks) -> npt.NDArray[np.int64]:
    """Per instance of a group, how many of the first masks have its bit."""
    leading = np.zeros(GROUP, np.int64)
    if not len(masks):
        return leading
    held = np.bitwise_and.accumulate(masks)
    # A bit that has gone never comes back: it is enough to look where some go.
    ends = (np.flatnonzero(held[1:] != held[:-1]) + 1).tolist()
    before = int(held[0])
    for end in (*ends, len(held)):
        after = int(held[end]) if end < len(held) else 0
        gone = before & ~after
        while gone:
            lowest = gone & -gone
            leading[lowest.bit_length() - 1] = end
            gone ^= lowest
        before = after
    return leading
