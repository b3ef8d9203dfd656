"""The gateway: takes requests, gives them to instances, and keeps them whole when instances die or messages are lost.

A request accepted by `generate` ends in exactly one way: completed, error, or abort. The gateway's table holds every
request that has not ended; each is in exactly one place:

    waiting  -- no instance may take it: none is ready, or those that are try suspects
    assigned -- submitted to an instance (Slot.assigned)
    suspects -- in flight at several deaths in a row: tried one at a time (Trial)

Only asyncio's primitives and the loop's clock are used here: the same class runs in virtual time.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import random
from collections.abc import Callable, Sequence

from kllm.cluster.admission import CompletionRate, QueueFull, Unavailable, admit
from kllm.cluster.cache_clearing import CLEAR_TIMEOUT_S, ClearedInstance, clear_caches
from kllm.cluster.cache_directory import CacheDirectory, CacheReport, prompt_hashes
from kllm.cluster.capacity_watch import CapacityWatch
from kllm.cluster.instance_handle import InstanceFailed
from kllm.cluster.instances import Instances
from kllm.cluster.launchers.launcher import InstanceLauncher
from kllm.cluster.placement import Place, Placement, fittest
from kllm.cluster.pool_routing import GlobalPools, PoolPolicy, PoolSettings
from kllm.cluster.prefix_index import Hashes
from kllm.cluster.request_stream import End, Gap, HeldKv, RequestStream
from kllm.cluster.routing import LeastLoaded, Router
from kllm.cluster.routing_log import RoutingLog
from kllm.cluster.slo_load import SloLoad
from kllm.cluster.slo_snapshot import SloLimits, SloSnapshot
from kllm.cluster.slot import Limits, Slot, SlotEvents
from kllm.cluster.trial import Trial
from kllm.messages import EngineLoad, Hello, PrefillDone, Role, Starting
from kllm.request import Delta, InvalidRequest, Request

__all__ = ["Gateway", "InstanceFailed", "QueueFull", "RequestStream", "Unavailable"]

logger = logging.getLogger(__name__)

RETRY_OUTAGE_S = 5  # Retry-After while no instance is ready, or all are too busy
MAX_REFUSALS = 6  # attempts that instances were too busy for, without a token between, before the client is told so
MAX_LOSSES = 20  # attempts in a row that yield nothing because messages are lost, before a request ends with an error
LEAVE_TIMEOUT_S = 30.0  # for what runs on an instance to end, before it is taken out
ROLE_TIMEOUT_S = 30.0  # for what runs on an instance to end, before it is used for something else
IDS_REMEMBERED = 65_536  # ids of ended requests whose attempts go on where they were if the id is used again


class Gateway:
    """Instances behind one bounded queue, one supervised slot for each launcher.

    router: chooses among the instances that may take a request. pools: chooses where they have roles.
    slo: targets that SLO Load is relative to. degrade: give things up while it is above 1 (see degradation.py).
    max_queue: requests in flight at once.
    start_timeout: seconds from launch to Hello.
    max_restarts: failures in a row (starts that fail, deaths that no request is to blame for) before a slot gives up.
    max_attempts: instances that a request may see die, without making progress, before it ends with an error.
    silence_limit: seconds without a message or a step from an instance that has work before it counts as hung.
    max_outage: seconds without a ready instance during which new requests are still taken.
    stop_grace: seconds that an instance gets to exit before it is killed.
    rng: draws seeds and jitter. on_starting: progress of every start, with the index of the slot.
    on_route: every submission: (request id, attempt, index of the slot).
    """

    def __init__(
        self,
        launchers: Sequence[InstanceLauncher],
        *,
        rng: random.Random,
        router: Router | None = None,
        pools: PoolPolicy | None = None,
        slo: SloLimits | None = None,
        degrade: bool = False,
        max_queue: int = 1024,
        start_timeout: float = 600.0,
        max_restarts: int = 5,
        max_attempts: int = 3,
        silence_limit: float = 60.0,
        max_outage: float = 30.0,
        stop_grace: float = 5.0,
        on_starting: Callable[[int, Starting], None] = lambda *_: None,
        on_route: Callable[[str, int, int], None] = lambda *_: None,
    ) -> None:
        if not launchers:
            raise ValueError("a gateway needs at least one launcher")
        self.info: Hello | None = None  # what every instance can take that is there, or was there last
        self.accepted = 0
        self.ended = dict.fromkeys(End, 0)
        self._rng = rng
        router = router or LeastLoaded(rng)
        uses_cache = router.uses_cache or (pools is not None and pools.uses_cache)
        self._directory = CacheDirectory(len(launchers)) if uses_cache else None
        slo = slo or SloLimits()
        pools = pools or GlobalPools(rng, PoolSettings(tpot_slo_s=slo.tpot_s))
        self._placement = Placement(router, pools, self._directory)
        self.routing = RoutingLog()
        self.slo = SloLoad(slo)
        self._degrade = degrade
        self._max_queue = max_queue
        self._max_attempts = max_attempts
        self._max_outage = max_outage
        self._on_route = on_route
        self._table: dict[str, RequestStream] = {}
        self._waiting: dict[str, RequestStream] = {}
        self._trial = Trial()
        self._assigned: dict[str, Slot] = {}
        self._last_attempts: dict[str, int] = {}  # of ended requests, oldest first
        self._idle = asyncio.Event()
        self._idle.set()
        self._settled = asyncio.Event()  # an instance is ready, or every first start has failed
        self._down_since = 0.0  # when the last ready instance ended
        self._draining = False
        self._rate = CompletionRate()
        limits = Limits(start_timeout, max_restarts, silence_limit, stop_grace)
        events = SlotEvents(
            starting=on_starting,
            ready=self._on_ready,
            start_failed=self._on_start_failed,
            settled=self._settled,
            delta=self._on_delta,
            astray=self._on_astray,
            cache=self._on_cache,
            prefilled=self._on_prefilled,
            over=self._on_over,
            gave_up=self._on_gave_up,
            needed=lambda: bool(self._table) or not self._draining,
            unfit=lambda hello: self._instances.unfit(hello),
        )
        self._instances = Instances(functools.partial(Slot, limits=limits, rng=rng, events=events), launchers)
        self._slots = self._instances.slots
        self._capacity = CapacityWatch(self._instances, self.slo, max_queue)

    # --- what can be seen ---

    @property
    def ready(self) -> bool:
        """An instance is ready and requests are taken."""
        return not self._draining and any(slot.ready for slot in self._slots)

    @property
    def healthy(self) -> bool:
        """False once every slot has given up restarting: only a new gateway helps."""
        return self._instances.healthy

    @property
    def slots(self) -> Sequence[Slot]:
        """Of all instances, by index; those that have been taken out stay until another one takes their place."""
        return self._slots

    @property
    def in_flight(self) -> int:
        return len(self._table)

    @property
    def restarts(self) -> int:
        return self._instances.restarts

    @property
    def loads(self) -> list[EngineLoad]:
        """The latest report of every slot's instance; zeros where there is none."""
        return self._instances.loads

    @property
    def load(self) -> EngineLoad:
        """The reports of all instances as one: sums, and means of the shares of KV blocks."""
        return self._instances.load

    @property
    def totals(self) -> EngineLoad:
        """The counters of EngineLoad, over all slots and incarnations."""
        return self._instances.totals

    @property
    def trips(self) -> int:
        """Times that an instance was avoided since requests failed there."""
        return self._instances.trips

    @property
    def grade(self) -> int:
        """Of degradation: 0, nothing is given up, to 3."""
        return self._capacity.grade

    def slo_snapshot(self) -> SloSnapshot:
        """SLO Load now. Costs some microseconds for each request in flight: for ticks, not for requests."""
        return self._capacity.snapshot()

    def check(self) -> None:
        """Every accepted request is in one place or has ended once."""
        assigned = [entry for slot in self._slots for entry in slot.assigned.items()]
        places = [*self._waiting.items(), *self._trial.suspects.items(), *assigned]
        assert dict(places) == self._table, "a request is lost, or held after its end"
        assert len(places) == len(self._table), "a request is in two places"
        assert self._assigned == {request_id: slot for slot in self._slots for request_id in slot.assigned}
        assert all(stream.end is None for stream in self._table.values()), "a request in the table has ended"
        assert self.accepted == len(self._table) + sum(self.ended.values()), "a request ended twice or never"
        assert self._idle.is_set() == (not self._table)
        probe = self._trial.probe
        if probe is not None:
            beside = [stream for stream in self._trial.slot.assigned.values() if stream is not probe]  # type: ignore[union-attr]
            assert self._assigned[probe.request.request_id] is self._trial.slot, "the suspect on trial is not running"
            assert all(stream.trusted for stream in beside), "the suspect on trial is not alone"

    # --- requests ---

    @property
    def directory(self) -> CacheDirectory | None:
        """What is known of the instances' caches; None where nobody asks."""
        return self._directory

    @property
    def block_naming(self) -> tuple[str, int] | None:
        """(fingerprint, tokens a block) that `generate` wants a prompt's hashes of; None: it needs none."""
        if self._directory is None or self.info is None or not self.info.fingerprint:
            return None
        return self.info.fingerprint, self.info.block_tokens

    def check_room(self, requests: int, priority: int) -> None:
        """Whether so many can be accepted now. Raises QueueFull, InvalidRequest if so many never can."""
        in_flight = len(self._table)
        if in_flight + requests <= self._capacity.limit(priority):
            return
        if requests > self._max_queue:
            raise InvalidRequest(f"{requests} outputs were asked for at once, {self._max_queue} is the most", "n")
        now, grade = asyncio.get_running_loop().time(), self.grade if in_flight + requests <= self._max_queue else 0
        raise QueueFull(in_flight, self._rate.seconds_for(max(float(requests), in_flight / 10), now), grade)

    def generate(self, request: Request, hashes: Hashes | None = None) -> RequestStream:
        """Accept a request. Read the stream to its end or `aclose()` it, which aborts the request at once.

        hashes: of its prompt, as block_naming says; made here if they are not given.
        Raises InvalidRequest, QueueFull or Unavailable here, before anything is streamed."""
        info = self._info_if_available()
        request_id = request.request_id
        self.check_room(1, request.priority)
        if request_id in self._table:
            raise InvalidRequest(f"a request with the id {request_id!r} is already running", "request_id")
        request = admit(request, info, self._rng.getrandbits(63))
        first_attempt = self._last_attempts.pop(request_id, -1) + 1
        naming = self.block_naming
        if hashes is None and naming is not None:
            hashes = prompt_hashes(request, *naming)
        stream = RequestStream(request, self._on_client_gone, first_attempt=first_attempt, hashes=hashes)
        self.accepted += 1
        self._table[request_id] = self._waiting[request_id] = stream
        now = asyncio.get_running_loop().time()
        self.slo.arrived(request_id, now, len(request.prompt_token_ids), stream.outputs)
        self._idle.clear()
        self._dispatch()
        return stream

    def _info_if_available(self) -> Hello:
        if not self.healthy:
            raise Unavailable(f"the model's instance keeps failing: {self._slots[0].error}")
        if self._draining:
            raise Unavailable("the server is shutting down", RETRY_OUTAGE_S)
        if self.info is None:
            raise Unavailable("the model is still loading", RETRY_OUTAGE_S)
        outage = asyncio.get_running_loop().time() - self._down_since
        if outage > self._max_outage and not any(slot.hello for slot in self._slots):
            raise Unavailable("the model is being restarted", RETRY_OUTAGE_S)
        return self.info

    def _dispatch(self) -> None:
        """Submit what waits, as far as there are instances that may take it."""
        ready = self._instances.willing()
        if not ready:
            return
        now = asyncio.get_running_loop().time()
        sick = any(slot.breaker.state(now) != "closed" for slot in ready)
        reserved = self._trial.reserve(ready)
        others = [slot for slot in ready if slot is not reserved]
        block_tokens = self.info.block_tokens if self.info is not None else 1
        for request_id, stream in list(self._waiting.items()):
            if stream.kv is not None and stream.kv.slot.incarnation != stream.kv.incarnation:
                stream.kv = None  # it is gone with its holder: prefilled again
            slots = fittest(stream, ready if stream.trusted else others, sick, now)
            if slots:
                del self._waiting[request_id]
                leader = self._assigned.get(stream.request.leader or "")
                self._assign(stream, self._placement.place(stream, slots, leader, block_tokens))
        probe = self._trial.next()
        if probe is not None and reserved is not None:
            matched = self._placement.matched(probe, block_tokens)(reserved.index)
            self._assign(probe, Place(reserved, matched, reason="trial"))

    def _assign(self, stream: RequestStream, place: Place) -> None:
        request_id, slot, now = stream.request.request_id, place.slot, asyncio.get_running_loop().time()
        self._assigned[request_id] = slot
        self.routing.add(place.decision(now, stream))
        tokens = len(stream.request.prompt_token_ids) + len(stream.outputs)
        held = 0 if stream.kv is None else stream.kv.tokens
        lacking, pulling = max(1, tokens - max(place.matched[-1], held)), max(0, held - place.matched[1])
        slot.submit(stream, lacking, pulling, place.prefill_only)
        slot.breaker.submitted(now)
        self.slo.submitted(request_id, now, slot.index, lacking)
        if self._directory is not None and stream.hashes is not None:
            self._directory.routed(slot.index, stream.hashes, now)
        self._on_route(request_id, stream.attempt, slot.index)

    def _on_delta(self, delta: Delta) -> None:
        stream = self._table.get(delta.request_id)
        if stream is None:
            return  # aborted meanwhile
        if delta.finish_reason == "abort":
            self._on_given_back(stream, delta)
            return
        try:
            if not stream.accept(delta):
                return
        except Gap as gap:
            self._on_astray(stream, str(gap))
            return
        if stream.silent:
            stream.silent = False
            self._assigned[delta.request_id].has_output(delta.request_id)
            self.routing.answered(delta.request_id, delta.num_cached_tokens)
            self.slo.has_output(delta.request_id, asyncio.get_running_loop().time(), delta.num_cached_tokens)
            self._release(stream)
        if stream.end is not None:
            slot = self._assigned[delta.request_id]
            if stream.end is End.ERROR and not delta.invalid:
                self._failed(slot, delta.error or "")
            else:
                slot.got_on()
            self._remove(stream)
        elif stream.takes_proof():
            self._assigned[delta.request_id].got_on()
            self._trial.forget(stream)
            if self._trial.active or self._waiting:
                self._dispatch()

    def _on_prefilled(self, slot: Slot, done: PrefillDone) -> None:
        """A request has been prefilled, and goes on elsewhere."""
        request_id = done.request_id
        stream = self._table.get(request_id)
        if stream is None or stream.attempt != done.attempt or self._assigned.get(request_id) is not slot:
            if done.kv is not None:  # it has ended, or went elsewhere meanwhile
                slot.release(done.kv.lease)
            return
        if len(stream.outputs) < done.num_outputs:
            if done.kv is not None:
                slot.release(done.kv.lease)
            self._on_astray(stream, f"{done.num_outputs} tokens were promised, {len(stream.outputs)} have come")
            return
        del self._assigned[request_id]
        slot.forget(stream)
        slot.got_on()
        stream.hand_over(HeldKv(done.kv, slot, slot.incarnation))
        self._waiting[request_id] = stream
        self._dispatch()

    def _release(self, stream: RequestStream) -> None:
        """Whoever holds KV for it may let it go."""
        held, stream.kv = stream.kv, None
        if held is not None and held.source is not None and held.slot.incarnation == held.incarnation:
            held.slot.release(held.source.lease)

    def _on_cache(self, slot: Slot, report: CacheReport) -> None:
        if self._directory is not None and not self._directory.heard(slot.index, report):
            slot.watch_cache()

    def _on_astray(self, stream: RequestStream, why: str) -> None:
        """Messages from or to the instance were lost: another attempt, there or elsewhere."""
        logger.warning("submitting request %s again: %s", stream.request.request_id, why)
        slot = self._assigned.pop(stream.request.request_id)
        self._failed(slot, why)
        slot.abort(stream)
        stream.next_attempt(died=False)
        self._try_again(stream, "messages were lost on the way")
        self._dispatch()

    def _on_given_back(self, stream: RequestStream, delta: Delta) -> None:
        """An instance does not go on with a request: what went wrong with it there is the delta's error; where that is
        None, the instance takes no more requests now. Another attempt, rather elsewhere."""
        request_id, slot = delta.request_id, self._assigned.get(delta.request_id)
        if slot is None or delta.attempt != stream.attempt:
            return
        del self._assigned[request_id]
        slot.forget(stream)
        why = delta.error or "it takes no more requests now"
        self._failed(slot, why)
        stream.next_attempt(died=False, refused=delta.error is None)
        stream.given_back_by = slot
        self._try_again(stream, why)
        self._dispatch()

    def _failed(self, slot: Slot, why: str) -> None:
        """A request failed there, by the instance's fault."""
        if slot.breaker.failed(asyncio.get_running_loop().time()):
            logger.error("instance %d is avoided for a while, too many requests fail there: %s", slot.index, why)

    def _try_again(self, stream: RequestStream, why: str) -> None:
        """A request whose attempt is lost: back into the queue, or the end if it has been tried too often."""
        self._trial.forget(stream)
        if stream.strikes >= self._max_attempts or stream.losses >= MAX_LOSSES:
            failed = max(stream.strikes, stream.losses)
            stream.fail(f"the request failed after {failed} attempts in a row: {why}")
            self._remove(stream)
        elif stream.refusals >= MAX_REFUSALS:
            stream.refuse(Unavailable("the model's instances take no more requests now", RETRY_OUTAGE_S))
            self._remove(stream)
        elif stream.strikes > 0 and stream.strikes == self._max_attempts - 1:
            self._trial.add(stream)
        else:
            self._waiting[stream.request.request_id] = stream

    def _on_client_gone(self, stream: RequestStream) -> None:
        slot = self._assigned.pop(stream.request.request_id, None)
        if slot is not None:
            slot.abort(stream)
        self._remove(stream)

    def _remove(self, stream: RequestStream) -> None:
        """Forget a request that has just ended."""
        assert stream.end is not None
        request_id = stream.request.request_id
        del self._table[request_id]
        self._release(stream)
        self._waiting.pop(request_id, None)
        slot = self._assigned.pop(request_id, None)
        if slot is not None:
            slot.forget(stream)
        self._trial.forget(stream)
        self._last_attempts[request_id] = stream.attempt
        if len(self._last_attempts) > IDS_REMEMBERED:
            del self._last_attempts[next(iter(self._last_attempts))]
        self.ended[stream.end] += 1
        now = asyncio.get_running_loop().time()
        self._rate.record(now)
        self.slo.ended(request_id, now)
        if not self._table:
            self._idle.set()
        if self._waiting or self._trial.suspects:
            self._dispatch()

    # --- the instances' lives ---

    async def start(self) -> Hello:
        """Launch all instances and wait until one is ready; the others join when they are. Raises InstanceFailed with
        the first instance's own message if none can start."""
        if self._degrade:
            self._capacity.start()
        for slot in self._slots:
            slot.open()
        try:
            await self._settled.wait()
        except BaseException:
            await self._close_slots()
            raise
        if self.info is None:
            await self._close_slots()
            raise InstanceFailed(self._slots[0].error)
        return self.info

    def _on_start_failed(self) -> None:
        if all(slot.error is not None for slot in self._slots):
            self._settled.set()

    def add_instance(self, launcher: InstanceLauncher) -> Slot:
        """One more instance, from now on. Raises ValueError where there is no room."""
        slot = self._instances.add(launcher)
        slot.set_grade(self.grade)
        if self._directory is not None:
            self._directory.grow(len(self._slots))
        if not self._draining:
            slot.open()
        return slot

    async def remove_instance(self, index: int, timeout: float = LEAVE_TIMEOUT_S) -> None:
        """Take an instance out: it gets nothing new, and `timeout` seconds to end what it has; the rest goes elsewhere.
        Raises KeyError for one that is not there."""
        slot = self._instances.find(index)
        await slot.leave(timeout)

    def _on_ready(self, slot: Slot) -> None:
        self.info = self._instances.common()
        self._watch_cache(slot)
        logger.info("instance %d is ready (%d of %d)", slot.index, len(self._instances.hellos), len(self._slots))
        self._settled.set()
        self._dispatch()

    def _watch_cache(self, slot: Slot) -> None:
        """A new instance: what does it cache?"""
        if self._directory is None or slot.hello is None:
            return
        held = sum(hello.num_blocks for hello in self._instances.hellos)
        self._directory.joined(slot.index, slot.hello, held)
        for other in self._slots:
            if other.hello is not None and not self._directory.knows(other.index):
                other.watch_cache()

    def _on_over(self, slot: Slot, lost: Sequence[RequestStream], reason: str) -> bool:
        """Take back what a dead instance was working on, and give it to the others. True if one of them is known to
        have killed it."""
        killer = self._trial.probe if self._trial.slot is slot else None
        self.slo.left(slot.index)
        if self._directory is not None:
            self._directory.left(slot.index)
        if self._instances.hellos:
            self.info = self._instances.common()
        else:
            self._down_since = asyncio.get_running_loop().time()
        waiting, self._waiting = self._waiting, {}  # the older requests go first
        for stream in lost:
            del self._assigned[stream.request.request_id]
            stream.next_attempt(died=not slot.left)  # one that is taken out has not died of its requests
            self._try_again(stream, reason)
        self._waiting.update(waiting)
        self._dispatch()
        return killer is not None

    def _on_gave_up(self, slot: Slot, reason: str) -> None:
        if self.healthy:
            return
        for stream in list(self._table.values()):
            stream.fail(f"the model's instance keeps failing: {reason}")
            self._remove(stream)

    async def set_role(self, index: int, role: Role, timeout: float = ROLE_TIMEOUT_S) -> bool:
        """Let the instance of a slot finish what it has, and use it for something else from then on.

        It gets nothing new meanwhile. What has not ended after `timeout` seconds goes on there beside its new work.
        Whether the instance has said that it has the role. Raises KeyError for a slot that does not exist."""
        slot = self._instances.find(index)
        return await slot.change_role(role, 1 + max(slot.term for slot in self._slots), timeout)

    async def clear_cache(self, store: bool = False, timeout: float = CLEAR_TIMEOUT_S) -> list[ClearedInstance]:
        """Let every instance forget the prefixes that no request uses; store: let the store forget them too.

        What is computed meanwhile may be cached again. Each instance gets `timeout` seconds to answer."""
        return await clear_caches(self._slots, store, timeout)

    # --- the end ---

    async def drain(self, timeout: float) -> None:
        """Take no new requests, give those in flight `timeout` seconds, abort the rest, and stop the instances."""
        self._draining = True
        try:
            await asyncio.wait_for(self._idle.wait(), timeout)
        except TimeoutError:
            logger.warning("aborting %d requests that did not finish in %g s", len(self._table), timeout)
            self._abort_all()
        await asyncio.gather(*(slot.drain() for slot in self._slots))
        await self.close()

    async def close(self) -> None:
        """Abort what is in flight and stop the instances. Idempotent."""
        self._draining = True
        self._abort_all()
        await self._close_slots()

    async def _close_slots(self) -> None:
        self._capacity.stop()
        await asyncio.gather(*(slot.close() for slot in self._slots))

    def _abort_all(self) -> None:
        for stream in list(self._table.values()):
            self._waiting.pop(stream.request.request_id, None)
            slot = self._assigned.pop(stream.request.request_id, None)
            if slot is not None:
                slot.abort(stream)
            stream.abort()
            self._remove(stream)
