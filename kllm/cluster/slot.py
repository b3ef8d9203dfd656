"""A slot: one place for an instance, kept filled. Incarnations come and go, the slot stays."""

from __future__ import annotations

import asyncio
import functools
import logging
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import msgspec

from kllm.cluster.breaker import Breaker
from kllm.cluster.cache_directory import CacheReport
from kllm.cluster.instance_handle import InstanceFailed, InstanceHandle
from kllm.cluster.launchers.launcher import InstanceLauncher, LaunchError, VisitingLauncher
from kllm.cluster.request_stream import RequestStream
from kllm.cluster.routing import Candidate
from kllm.cluster.slo_prediction import InstanceReport
from kllm.messages import CacheCleared, EngineLoad, Hello, PrefillDone, Role, Starting
from kllm.request import Delta
from kllm.telemetry.tier_counts import add_tier_counts

logger = logging.getLogger(__name__)

FIRST_BACKOFF_S = 0.5
LONGEST_BACKOFF_S = 30.0
LONGEST_REVISIT_S = 5.0  # of instances started elsewhere: to look whether one is there costs nothing
ROLE_ANSWER_S = 5.0  # several reports long
DEATHS_BLAMED_ON_REQUESTS = 3  # in a row without any request getting on; after that the slot itself is to blame


@dataclass(frozen=True, slots=True)
class Limits:
    """start_timeout: seconds from launch to Hello. max_restarts: failures in a row before a slot gives up for good.
    silence_limit: seconds without a message or a step from an instance that has work before it counts as hung.
    stop_grace: seconds that an instance gets to exit before it is killed."""

    start_timeout: float
    max_restarts: int
    silence_limit: float
    stop_grace: float


@dataclass(frozen=True, slots=True)
class SlotEvents:
    """What a slot tells its gateway. All are called on the loop and must not block.

    starting: progress of a start. ready: an instance is there. start_failed: the very first start failed; the slot
    tries again when `settled` is set. delta: output of an instance. astray: messages about this request were lost.
    cache: what an instance says about its cache. prefilled: a request has done its part there.
    over: an instance died with these requests; True if one of them is known to be the killer. gave_up: the slot stays
    empty. needed: whether a new instance is wanted after a death. unfit: why this instance cannot be one of them.
    """

    starting: Callable[[int, Starting], None]
    ready: Callable[[Slot], None]
    start_failed: Callable[[], None]
    settled: asyncio.Event
    delta: Callable[[Delta], None]
    astray: Callable[[RequestStream, str], None]
    cache: Callable[[Slot, CacheReport], None]
    prefilled: Callable[[Slot, PrefillDone], None]
    over: Callable[[Slot, Sequence[RequestStream], str], bool]
    gave_up: Callable[[Slot, str], None]
    needed: Callable[[], bool]
    unfit: Callable[[Hello], str | None]


class Slot:
    """failures: in a row, starts that fail and deaths that no request is to blame for.
    fruitful: a request has got on at the present incarnation.
    resting: it gets nothing new while there are others. left: it is being taken out, for good; vacant: it has been.
    breaker: whether its instance answers requests or fails them.
    address: where its instances are; None where they are started here. trouble: why there is none now.
    error: why the first start failed, or why the slot gave up. last: the last incarnation that has ended, and its
    latest report; one that was started elsewhere may be met again. past: counters of those before it.
    """

    def __init__(
        self, index: int, launcher: InstanceLauncher, limits: Limits, rng: random.Random, events: SlotEvents
    ) -> None:
        self.index = index
        self.failures = 0
        self.fruitful = False
        self.restarts = 0
        self.resting = False
        self.breaker = Breaker()
        self._grade = 0
        self.left = self.vacant = False
        self.address = launcher.address if isinstance(launcher, VisitingLauncher) else None
        self.trouble: str | None = None
        self.error: str | None = None
        self.gave_up = False
        self._launcher = launcher
        self._limits = limits
        self._rng = rng
        self._events = events
        self._handle: InstanceHandle | None = None  # from Hello to the end
        self._life: asyncio.Task[None] | None = None
        self._wanted_role: tuple[Role, int] | None = None
        self._role_orders = 0
        self._started = False
        self._barren_deaths = 0  # in a row
        self.past = EngineLoad()
        self.last = ("", EngineLoad())

    # --- what can be seen ---

    @property
    def ready(self) -> bool:
        return self._handle is not None and self._handle.ready and not self.left

    @property
    def role(self) -> Role:
        """What its instance is used for."""
        return "both" if self._handle is None else self._handle.role

    @property
    def term(self) -> int:
        return 0 if self._handle is None else self._handle.term

    @property
    def transfers(self) -> bool:
        """Its instance can hand KV over and take it."""
        return self.hello is not None and self.hello.transfers

    @property
    def resumes(self) -> bool:
        """Its instance can continue after given outputs token for token."""
        return self.hello is not None and self.hello.resumes

    @property
    def incarnation(self) -> str:
        """Of the instance that is there; "" if none is."""
        return "" if self.hello is None else self.hello.incarnation

    @property
    def silent_s(self) -> float | None:
        """Seconds since its instance said something; None while there is none."""
        return None if self._handle is None else self._handle.silent_s

    @property
    def state(self) -> str:
        """For the operator."""
        if self.left:
            return "left"
        if self.gave_up:
            return "given up"
        if self._handle is None:
            return "absent" if self.address is not None else "starting"
        if self._handle.leaving:
            return "leaving"
        if self.breaker.state(asyncio.get_running_loop().time()) != "closed":
            return "avoided"
        return "resting" if self.resting else "quiet" if self.quiet else "ready"

    @property
    def quiet(self) -> bool:
        """Its instance's reports fail to come."""
        return self._handle is not None and self._handle.quiet

    @property
    def hello(self) -> Hello | None:
        """Of the instance that is there."""
        return None if self._handle is None else self._handle.hello

    @property
    def assigned(self) -> dict[str, RequestStream]:
        return {} if self._handle is None else self._handle.assigned

    @property
    def load(self) -> EngineLoad:
        """The instance's latest report; zeros while there is none."""
        return EngineLoad() if self._handle is None else self._handle.load

    @property
    def totals(self) -> EngineLoad:
        """The counters of EngineLoad, over all incarnations."""
        return add_counters(self.past, add_up([self.last, (self.incarnation, self.load)]))

    def candidate(self, matched: tuple[int, int, int] = (0, 0, 0)) -> Candidate:
        """What a router may know of it, while it is ready. matched: Candidate's l1, l2 and l3."""
        handle = self._handle
        assert handle is not None
        assert handle.hello is not None
        return Candidate(
            index=self.index,
            assigned=len(handle.assigned),
            load=handle.load,
            num_blocks=handle.hello.num_blocks,
            block_tokens=handle.hello.block_tokens,
            max_num_seqs=handle.hello.max_num_seqs,
            chunk_tokens=handle.hello.chunk_tokens,
            page_bytes=handle.hello.page_bytes,
            prefilling=handle.backlog.prefilling,
            prefills=handle.backlog.prefills,
            foreign=handle.backlog.foreign,
            unreported=handle.backlog.unreported,
            holding=handle.backlog.holding,
            pulling=handle.backlog.pulling,
            l1=matched[0],
            l2=matched[1],
            l3=matched[2],
        )

    def report(self) -> InstanceReport:
        """What SLO Load is made from, while an instance is there."""
        handle = self._handle
        assert handle is not None
        assert handle.hello is not None
        hello = handle.hello
        return InstanceReport(
            index=self.index,
            load=msgspec.structs.replace(handle.load, progress=None),  # snapshots are kept
            role=self.role,
            chunk_tokens=hello.chunk_tokens,
            max_num_seqs=hello.max_num_seqs,
            kv_tokens=hello.num_blocks * hello.block_tokens,
        )

    # --- requests ---

    def submit(self, stream: RequestStream, lacking: int, pulling: int, prefill_only: bool) -> None:
        """lacking: tokens that its instance has to compute first. pulling: those whose KV it takes from another."""
        assert self._handle is not None
        self._handle.submit(stream, lacking, pulling, prefill_only)

    def release(self, lease: str) -> None:
        """KV that its instance holds for others is not needed any more."""
        if self._handle is not None:
            self._handle.release(lease)

    def has_output(self, request_id: str) -> None:
        """A request that is here has begun to answer."""
        if self._handle is not None:
            self._handle.has_output(request_id)

    def watch_cache(self) -> None:
        """Ask its instance what it caches."""
        if self._handle is not None:
            self._handle.watch_cache()

    def abort(self, stream: RequestStream) -> None:
        """Stop the current attempt of a request that is here."""
        assert self._handle is not None
        self._handle.abort(stream)
        self.breaker.undecided()

    def forget(self, stream: RequestStream) -> None:
        """A request that was here has ended."""
        if self._handle is not None:
            self._handle.forget(stream.request.request_id)

    def got_on(self) -> None:
        """A request has ended well or proven itself here."""
        self.failures = self._barren_deaths = 0
        self.fruitful = True
        self.breaker.succeeded()

    def set_grade(self, grade: int) -> None:
        """Of degradation: for its instance, and those that follow."""
        self._grade = grade
        if self._handle is not None:
            self._handle.set_grade(grade)

    def wants(self, role: Role) -> None:
        """The next instance that comes gets this role, if it has another."""
        self._wanted_role = (role, 0)

    async def change_role(self, role: Role, term: int, timeout: float) -> bool:
        """Give it nothing new and `timeout` seconds to end what it has, then the role. Whether it says that it has it.

        Where no instance is there, the next one gets the role. Of several orders at once the latest holds, and the slot
        rests as long as that one waits; the others come to nothing."""
        self._role_orders += 1
        order, handle = self._role_orders, self._handle
        if self._wanted_role is not None:
            term = max(term, self._wanted_role[1] + 1)  # that one may not have been reported yet
        if handle is None:
            self._wanted_role = (role, term)
            return False
        self.resting = True
        try:
            await handle.until(lambda: not handle.assigned or order != self._role_orders, timeout)
        finally:
            if order == self._role_orders:
                self.resting = False
        if order != self._role_orders:
            return False
        self._wanted_role = (role, term)
        handle.set_role(role, term)
        return await handle.until(lambda: handle.term >= term, ROLE_ANSWER_S) and handle.role == role

    async def clear_cache(self, store: bool, timeout: float) -> CacheCleared | None:
        """The instance's answer; None if none is there, or it ended or could not be reached any more meanwhile. Raises
        TimeoutError."""
        return None if self._handle is None else await self._handle.clear_cache(store, timeout)

    # --- life ---

    def open(self) -> None:
        """Launch the first instance, and keep the slot filled from now on."""
        self._life = asyncio.create_task(self._live())

    def launch_with(self, launcher: InstanceLauncher) -> None:
        """From the next instance on. It must lead to the same address."""
        self._launcher = launcher

    async def leave(self, timeout: float) -> None:
        """Take its instance out: it gets nothing new, and `timeout` seconds to end what it has; what is left then goes
        elsewhere. One that was started here ends, others go on without us."""
        self.left = True
        handle = self._handle
        if handle is not None:
            await handle.until(lambda: not handle.assigned, timeout)
        if self._life is not None:
            self._life.cancel()
            await asyncio.gather(self._life, return_exceptions=True)
        if self._handle is not None:
            await self.drain()
            last = self._end_incarnation()
            self._events.over(self, list(last.assigned.values()), "the instance was taken out")
            await last.stop(self._limits.stop_grace)
        self.vacant = True

    async def drain(self) -> None:
        """Let the instance end by itself, if it does so in time; one that was started elsewhere learns that we go.
        Nothing is assigned to it any more."""
        if self._handle is not None:
            self._handle.drain()
            if self.address is not None:
                return
            await self._handle.ended(self._limits.stop_grace)

    async def close(self) -> None:
        """Stop the instance and fill the slot no more. Idempotent."""
        if self._life is not None:
            self._life.cancel()
            await asyncio.gather(self._life, return_exceptions=True)
        if self._handle is not None:
            handle = self._end_incarnation()
            await handle.stop(self._limits.stop_grace)

    async def _live(self) -> None:
        try:
            while True:
                reason = await self._incarnation()
                if reason is None:
                    return
                if self.address is None and self.failures > self._limits.max_restarts:
                    break
                await asyncio.sleep(self._backoff())
                self.restarts += self.address is None
        except Exception as error:
            logger.exception("the supervision of instance %d failed", self.index)
            reason = f"internal error: {error!r}"
        await self._give_up(reason)

    async def _incarnation(self) -> str | None:
        """One instance from its launch to its end: why it ended, None if no other one is needed."""
        try:
            handle = await self._launch()
        except InstanceFailed as error:
            self.failures += 1
            if self.address is not None:
                if self.trouble != str(error):
                    self.trouble = str(error)
                    logger.warning("instance %d is not there: %s", self.index, error)
                return self.trouble
            # Where all first starts fail, whoever waits for the gateway's start says so.
            level = logging.ERROR if self._started else logging.INFO
            logger.log(level, "instance %d could not be started: %s", self.index, error)
            if not self._started:
                self._started, self.error = True, str(error)
                self._events.start_failed()
                await self._events.settled.wait()
            return str(error)
        self._started, self.fruitful, self.trouble = True, False, None
        self._handle = handle
        self.breaker.reset()
        if self._grade:
            handle.set_grade(self._grade)
        if self._wanted_role is not None and handle.role != self._wanted_role[0]:
            role, term = self._wanted_role
            handle.set_role(role, max(term, handle.term + 1))
        self._events.ready(self)
        reason = await handle.over()
        if not self._events.needed():
            return None
        lost = list(handle.assigned.values())
        logger.error("the instance ended with %d requests in flight (instance %d): %s", len(lost), self.index, reason)
        self._end_incarnation()
        killer_known = self._events.over(self, lost, reason)
        self._barren_deaths = 0 if killer_known or self.fruitful else self._barren_deaths + 1
        if not lost or self._barren_deaths > DEATHS_BLAMED_ON_REQUESTS:
            self.failures += 1  # otherwise its requests are to blame first: they cannot kill more than a few
        await handle.stop(self._limits.stop_grace)
        return reason

    async def _launch(self) -> InstanceHandle:
        """A ready instance. Raises InstanceFailed with the instance's own message."""
        try:
            instance = await self._launcher.launch()
        except LaunchError as error:
            raise InstanceFailed(str(error)) from error
        handle = InstanceHandle(
            instance,
            on_starting=functools.partial(self._events.starting, self.index),
            on_delta=self._events.delta,
            on_astray=self._events.astray,
            on_cache=functools.partial(self._events.cache, self),
            on_prefilled=functools.partial(self._events.prefilled, self),
            silence_limit=self._limits.silence_limit,
        )
        try:
            unfit = self._events.unfit(await handle.started(self._limits.start_timeout))
            if unfit is not None:
                raise InstanceFailed(unfit)
        except BaseException:
            await handle.stop(self._limits.stop_grace)
            raise
        return handle

    def _end_incarnation(self) -> InstanceHandle:
        assert self._handle is not None
        if self.incarnation and self.incarnation == self.last[0]:
            latest = max((self.last[1], self.load), key=lambda load: load.sequence)
        else:
            self.past, latest = add_counters(self.past, self.last[1]), self.load
        self.last = (self.incarnation, latest)
        handle, self._handle = self._handle, None
        return handle

    def _backoff(self) -> float:
        """Seconds before the next start: none after a death during work, then doubling, with jitter."""
        if self.failures == 0:
            return 0.0
        most = LONGEST_BACKOFF_S if self.address is None else LONGEST_REVISIT_S
        longest = min(most, FIRST_BACKOFF_S * 2.0 ** min(self.failures - 1, 10))
        return longest * self._rng.uniform(0.5, 1.0)

    async def _give_up(self, reason: str) -> None:
        logger.critical("giving up on instance %d: %s", self.index, reason)
        self.gave_up, self.error = True, reason
        if not self._started:
            self._started = True
            self._events.start_failed()
        if self._handle is None:
            self._events.gave_up(self, reason)
            return
        handle = self._end_incarnation()  # only after an internal error
        self._events.over(self, list(handle.assigned.values()), reason)
        self._events.gave_up(self, reason)
        await handle.stop(self._limits.stop_grace)


def add_up(reports: Iterable[tuple[str, EngineLoad]]) -> EngineLoad:
    """The counters of all, by (incarnation, report): of several reports of one incarnation the latest counts, and of
    equal ones the last. Those of "" are each of another."""
    total, latest = EngineLoad(), dict[str, EngineLoad]()
    for incarnation, load in reports:
        if not incarnation:
            total = add_counters(total, load)
        elif incarnation not in latest or load.sequence >= latest[incarnation].sequence:
            latest[incarnation] = load
    return functools.reduce(add_counters, latest.values(), total)


def add_counters(a: EngineLoad, b: EngineLoad) -> EngineLoad:
    """What is counted, added; what is of the moment is left out."""
    return EngineLoad(
        preemptions=a.preemptions + b.preemptions,
        yields=a.yields + b.yields,
        quota_tokens=a.quota_tokens + b.quota_tokens,
        overtakes=a.overtakes + b.overtakes,
        prefix_queries=a.prefix_queries + b.prefix_queries,
        prefix_hits=a.prefix_hits + b.prefix_hits,
        l2_hits=a.l2_hits + b.l2_hits,
        l3_hits=a.l3_hits + b.l3_hits,
        wasted=a.wasted + b.wasted,
        tiers=add_tier_counts(a.tiers, b.tiers),
        events_sent=a.events_sent + b.events_sent,
        events_dropped=a.events_dropped + b.events_dropped,
        steps=a.steps + b.steps,
        step_s=a.step_s + b.step_s,
    )
