"""Node: one simulated machine. Its clock is wrong by an offset, its process can stop for a while, it can lose power."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable


class Port:
    """One direction of a node's network card: messages pass one after the other, at its bandwidth."""

    __slots__ = ("bytes_per_s", "free_at")

    def __init__(self, bytes_per_s: float) -> None:
        self.bytes_per_s = bytes_per_s
        self.free_at = 0.0

    def pass_through(self, ready_at: float, size: int) -> float:
        """When a message that is there at `ready_at` has passed."""
        start = ready_at if ready_at > self.free_at else self.free_at
        self.free_at = start + size / self.bytes_per_s
        return self.free_at


class Node:
    """index: its number in the fleet; -1 is the gateway's node.

    clock: what a process on this node reads; only differences are meaningful, as with time.monotonic.
    slow: factor on the duration of its steps. powered: False while the machine is down.
    frozen: its processes are stopped (they neither send nor receive nor complete a step) until thaw().
    """

    def __init__(self, index: int, bytes_per_s: float, clock_offset_s: float = 0.0) -> None:
        self.index = index
        self.name = f"instance {index}" if index >= 0 else "gateway"
        self.egress = Port(bytes_per_s)
        self.ingress = Port(bytes_per_s)
        self.slow = 1.0
        self.frozen = False
        self.unreachable = False  # cut off from every other node
        self._clock_offset_s = clock_offset_s
        self._held: deque[Callable[[], None]] = deque()
        self._powered = asyncio.Event()
        self._powered.set()
        self._reachable = asyncio.Event()
        self._reachable.set()

    # -- time ------------------------------------------------------------------------------------------------

    def clock(self) -> float:
        return asyncio.get_running_loop().time() + self._clock_offset_s

    def skew(self, seconds: float) -> None:
        """The clock is set forward or back by hand."""
        self._clock_offset_s += seconds

    # -- standing still --------------------------------------------------------------------------------------

    def when_running(self, action: Callable[[], None]) -> None:
        """Do it now, or when the node's processes run again, in order."""
        if self.frozen:
            self._held.append(action)
        else:
            action()

    def freeze(self) -> None:
        self.frozen = True

    def thaw(self) -> None:
        self.frozen = False
        while self._held and not self.frozen:
            self._held.popleft()()

    # -- power and network -----------------------------------------------------------------------------------

    @property
    def powered(self) -> bool:
        return self._powered.is_set()

    def power_off(self) -> None:
        """Whatever it was about to do is lost with it."""
        self._powered.clear()
        self._held.clear()
        self.frozen = False

    def power_on(self) -> None:
        self._powered.set()

    def cut_off(self) -> None:
        self.unreachable = True
        self._reachable.clear()

    def reconnect(self) -> None:
        self.unreachable = False
        self._reachable.set()

    async def usable(self) -> None:
        """Waits until the machine is up and can be reached."""
        while self.unreachable or not self.powered:
            await self._powered.wait()
            await self._reachable.wait()
