"""CapacityWatch: looks at SLO Load every second and says what is given up while capacity is short (degradation.py)."""

from __future__ import annotations

import asyncio
import logging

from kllm.cluster.degradation import GRADES, Degradation, queue_limit
from kllm.cluster.instances import Instances
from kllm.cluster.slo_load import SloLoad
from kllm.cluster.slo_snapshot import SloSnapshot

logger = logging.getLogger(__name__)

TICK_S = 1.0


class CapacityWatch:
    """Without start() nothing is ever given up."""

    def __init__(self, instances: Instances, slo: SloLoad, max_queue: int) -> None:
        self._instances = instances
        self._slo = slo
        self._max_queue = max_queue
        self._degradation = Degradation()
        self._ticking: asyncio.Task[None] | None = None

    @property
    def grade(self) -> int:
        """Of degradation: 0, nothing is given up, to 3."""
        return self._degradation.grade

    def limit(self, priority: int) -> int:
        """Requests in flight beyond which one of this priority is refused."""
        if self.grade < 2:
            return self._max_queue
        return queue_limit(self.grade, priority, self._max_queue, self._instances.at_once)

    def snapshot(self) -> SloSnapshot:
        """SLO Load now. Costs some microseconds for each request in flight: for ticks, not for requests."""
        reports = [slot.report() for slot in self._instances if slot.ready]
        return self._slo.snapshot(asyncio.get_running_loop().time(), reports)

    def start(self) -> None:
        self._ticking = asyncio.create_task(self._tick())

    def stop(self) -> None:
        if self._ticking is not None:
            self._ticking.cancel()

    async def _tick(self) -> None:
        degradation = self._degradation
        while True:
            await asyncio.sleep(TICK_S)
            load = load_to_relieve(self.snapshot())
            if degradation.update(asyncio.get_running_loop().time(), load):
                grade = degradation.grade
                logger.warning("SLO Load is %.2f: degradation grade %d (%s)", load, grade, GRADES[grade])
                for slot in self._instances:
                    slot.set_grade(grade)


def load_to_relieve(snapshot: SloSnapshot) -> float:
    """SLO Load of the side that is shorter of capacity; 0 where no instance has more than one request, since nobody
    waits for anybody then: a request that misses the SLO by itself is no reason to refuse others, and a fleet without
    work has all of its capacity left, however late the last answers were."""
    if snapshot.waiting + snapshot.decoding <= len(snapshot.instances):
        return 0.0
    return max((pool.side.load for pool in snapshot.pools.values()), default=0.0)
