"""Leases: which blocks of L2 stay because another instance is to read them, and until when. No clock."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from kllm.cache.tiers.host_pool import HostBlock, HostPool

SHARE = 0.75  # of L2, at most: there are always slots for what is brought up


class _Lease:
    __slots__ = ("blocks", "until")

    def __init__(self, until: float) -> None:
        self.until = until
        self.blocks: list[HostBlock] = []


class Leases:
    """Pins of a pool's blocks, by name; a lease pins slots of L2 and nothing else, and a new one may push out the
    oldest: so nobody ever waits for another instance to take what it wanted."""

    def __init__(self, pool: HostPool) -> None:
        self._pool = pool
        self._leases: dict[str, _Lease] = {}  # oldest first
        self._pins: dict[HostBlock, int] = {}  # leases that hold the block
        self.most = max(1, int(SHARE * pool.num_slots))  # blocks
        self.revoked = 0
        self.expired = 0

    def __len__(self) -> int:
        return len(self._leases)

    def __contains__(self, name: str) -> bool:
        return name in self._leases

    def open(self, name: str, until: float) -> None:
        """A new lease of no blocks yet; one of this name that is there ends."""
        self.release([name])
        self._leases[name] = _Lease(until)

    def make_room(self, name: str, hashes: Sequence[bytes]) -> None:
        """Revoke the oldest leases, but not this one, until these blocks can have slots and be pinned."""
        pool, pins = self._pool, self._pins
        absent = sum(block_hash not in pool for block_hash in hashes)
        held = [pool.get(block_hash) for block_hash in hashes]
        new = sum(block is None or block not in pins for block in held)
        while pool.available < absent or len(pins) + new > self.most:
            oldest = next((other for other in self._leases if other != name), None)
            if oldest is None:
                return
            self.release([oldest])
            self.revoked += 1

    def add(self, name: str, blocks: Iterable[HostBlock]) -> int:
        """Pin further blocks under a lease, as many as there may be. How many it holds now; 0 if it has ended."""
        lease = self._leases.get(name)
        if lease is None:
            return 0
        for block in blocks:
            if block not in self._pins and len(self._pins) >= self.most:
                break
            self._pins[block] = self._pins.get(block, 0) + 1
            self._pool.pin([block])
            lease.blocks.append(block)
        return len(lease.blocks)

    def blocks(self, name: str) -> list[HostBlock]:
        """What it holds, in order; nothing if it has ended."""
        lease = self._leases.get(name)
        return list(lease.blocks) if lease is not None else []

    def release(self, names: Iterable[str]) -> None:
        """They are over; unknown ones are ignored."""
        for name in names:
            lease = self._leases.pop(name, None)
            if lease is None:
                continue
            for block in lease.blocks:
                left = self._pins.pop(block) - 1
                if left:
                    self._pins[block] = left
            self._pool.unpin(lease.blocks)

    def expire(self, now: float) -> None:
        """End those whose time is over."""
        over = [name for name, lease in self._leases.items() if lease.until <= now]
        self.release(over)
        self.expired += len(over)

    def clear(self) -> None:
        self.release(list(self._leases))

    def check(self) -> None:
        """Raise AssertionError unless every pin is that of a lease."""
        held = [block for lease in self._leases.values() for block in lease.blocks]
        assert sum(self._pins.values()) == len(held)
        assert all(block.ready and block.pins >= self._pins[block] for block in held)
        assert len(self._pins) <= self.most
