"""Instances: the gateway's slots as one. Who may take a request, what all of them are and have done together."""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Iterator, Sequence

import msgspec

from kllm.cluster.external.block_names import FINGERPRINT
from kllm.cluster.launchers.launcher import InstanceLauncher
from kllm.cluster.prefix_index import MOST_INSTANCES
from kllm.cluster.slot import Slot, add_counters, add_up
from kllm.messages import EngineLoad, Hello

UNKNOWN_VOCABULARY = 2**31 - 1  # of an external engine that does not tell


class Instances:
    """slots: by index; those that have been taken out stay until another one takes their place.

    new_slot: makes one from its index and its launcher."""

    def __init__(
        self, new_slot: Callable[[int, InstanceLauncher], Slot], launchers: Sequence[InstanceLauncher]
    ) -> None:
        self._new_slot = new_slot
        self.slots = [new_slot(index, launcher) for index, launcher in enumerate(launchers)]
        # Of slots that were taken out and filled again:
        self._past = EngineLoad()
        self._last: deque[tuple[str, EngineLoad]] = deque()  # what was there last may be met again, elsewhere
        self._restarts = self._trips = 0

    def __iter__(self) -> Iterator[Slot]:
        return iter(self.slots)

    def __len__(self) -> int:
        return len(self.slots)

    # -- membership ------------------------------------------------------------------------------------------

    def add(self, launcher: InstanceLauncher) -> Slot:
        """One more. Raises ValueError where there is no room."""
        index = next((slot.index for slot in self.slots if slot.vacant), len(self.slots))
        if index >= MOST_INSTANCES:
            raise ValueError(f"a gateway has room for {MOST_INSTANCES} instances")
        slot = self._new_slot(index, launcher)
        if index < len(self.slots):
            self._retire(self.slots[index])
            self.slots[index] = slot
        else:
            self.slots.append(slot)
        return slot

    def _retire(self, slot: Slot) -> None:
        """Its counters are all that is left of it."""
        self._past = add_counters(self._past, slot.past)
        self._last.append(slot.last)
        if len(self._last) > MOST_INSTANCES:
            self._past = add_counters(self._past, self._last.popleft()[1])
        self._restarts += slot.restarts
        self._trips += slot.breaker.trips

    def find(self, index: int) -> Slot:
        """Raises KeyError for one that is not there, or is being taken out."""
        slot = self.slots[index] if 0 <= index < len(self.slots) else None
        if slot is None or slot.left:
            raise KeyError(index)
        return slot

    def unfit(self, hello: Hello) -> str | None:
        """Why a new instance cannot serve beside the others."""
        for other in self.slots:
            there = other.hello
            sizes = {hello.vocab_size} if there is None else {hello.vocab_size, there.vocab_size}
            if there is not None and len(sizes - {UNKNOWN_VOCABULARY}) > 1:
                return (
                    f"it serves another model ({hello.model}, a vocabulary of {hello.vocab_size} tokens) than instance "
                    f"{other.index} ({there.model}, {there.vocab_size})"
                )
        return None

    # -- who is there ----------------------------------------------------------------------------------------

    @property
    def hellos(self) -> list[Hello]:
        """Of the instances that are there."""
        return [slot.hello for slot in self.slots if slot.hello is not None]

    def common(self) -> Hello:
        """What every one of them can take, of which there is at least one. What cannot be common is the first one's, if
        it can be of one that reports its cache itself: so blocks keep their names while external engines come and go.

        num_blocks: of that one's size, as many as hold no more tokens than the KV cache of any."""
        hellos = self.hellos
        first = next((hello for hello in hellos if hello.fingerprint not in ("", FINGERPRINT)), hellos[0])
        tokens = min(hello.num_blocks * hello.block_tokens for hello in hellos)
        return msgspec.structs.replace(
            first,
            max_model_len=min(hello.max_model_len for hello in hellos),
            vocab_size=min(hello.vocab_size for hello in hellos),
            num_blocks=tokens // max(1, first.block_tokens),
        )

    def willing(self) -> list[Slot]:
        """Those that may get a request: ready, and of several rather those whose reports come and that do not rest."""
        ready = [slot for slot in self.slots if slot.ready]
        if len(ready) > 1:
            return [slot for slot in ready if not (slot.quiet or slot.resting)] or ready
        return ready

    @property
    def healthy(self) -> bool:
        """False once every slot has given up restarting."""
        members = [slot for slot in self.slots if not slot.vacant]
        return not members or not all(slot.gave_up for slot in members)

    @property
    def at_once(self) -> int:
        """Requests that they run at the same time, at most."""
        return sum(hello.max_num_seqs for hello in self.hellos)

    # -- what they say ---------------------------------------------------------------------------------------

    @property
    def loads(self) -> list[EngineLoad]:
        """The latest report of every slot's instance; zeros where there is none."""
        return [slot.load for slot in self.slots]

    @property
    def load(self) -> EngineLoad:
        """The reports of all as one: sums, and means of the shares of KV blocks."""
        loads, ready = self.loads, max(1, len(self.hellos))
        total = EngineLoad()
        for load in loads:
            total = add_counters(total, load)
        return msgspec.structs.replace(
            total,
            running=sum(load.running for load in loads),
            waiting=sum(load.waiting for load in loads),
            blocked=sum(load.blocked for load in loads),
            kv_usage=sum(load.kv_usage for load in loads) / ready,
            kv_cached=sum(load.kv_cached for load in loads) / ready,
        )

    @property
    def totals(self) -> EngineLoad:
        """The counters of EngineLoad, over all slots and incarnations."""
        past = functools.reduce(add_counters, (slot.past for slot in self.slots), self._past)
        ended = [*self._last, *(slot.last for slot in self.slots)]
        return add_counters(past, add_up([*ended, *((slot.incarnation, slot.load) for slot in self.slots)]))

    @property
    def restarts(self) -> int:
        """Times that instances were started again."""
        return self._restarts + sum(slot.restarts for slot in self.slots)

    @property
    def trips(self) -> int:
        """Times that an instance was avoided since requests failed there."""
        return self._trips + sum(slot.breaker.trips for slot in self.slots)
