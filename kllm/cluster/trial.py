"""Trial: requests that were in flight at several deaths in a row are tried one at a time, so that only the killer is
blamed.

The one that is tried (the probe) shares its instance with trusted requests only: those that have proven themselves
since the last death that they saw. Everything else goes to other instances meanwhile, or waits if there is none.
"""

from __future__ import annotations

from collections.abc import Sequence

from kllm.cluster.request_stream import RequestStream
from kllm.cluster.slot import Slot


class Trial:
    """suspects: wait to be tried, oldest first. probe: is being tried. slot: where, or where the next one will be."""

    def __init__(self) -> None:
        self.suspects: dict[str, RequestStream] = {}
        self.probe: RequestStream | None = None
        self.slot: Slot | None = None

    @property
    def active(self) -> bool:
        return self.probe is not None or bool(self.suspects)

    def add(self, stream: RequestStream) -> None:
        self.suspects[stream.request.request_id] = stream

    def forget(self, stream: RequestStream) -> None:
        """It has proven itself, ended, or lost its attempt."""
        self.suspects.pop(stream.request.request_id, None)
        if self.probe is stream:
            self.probe = None

    def reserve(self, ready: Sequence[Slot]) -> Slot | None:
        """The slot that takes only trusted requests now; None if nobody is under suspicion.

        Until the probe runs it is the ready slot with the fewest requests that are not trusted; a slot that has shown
        that it works, if there is one, so that no innocent is blamed for a broken machine."""
        if not self.active:
            self.slot = None
        elif self.probe is None:
            self.slot = min(ready, key=self._preference)
        return self.slot

    def _preference(self, slot: Slot) -> tuple[bool, int, bool, int]:
        return not slot.fruitful, untrusted(slot), slot is not self.slot, slot.index

    def next(self) -> RequestStream | None:
        """The suspect to submit to the reserved slot now, if it is its turn."""
        if self.probe is not None or not self.suspects or self.slot is None or untrusted(self.slot):
            return None
        self.probe = self.suspects.pop(next(iter(self.suspects)))
        return self.probe


def untrusted(slot: Slot) -> int:
    """How many of the requests assigned to the slot have still to prove themselves."""
    return sum(not stream.trusted for stream in slot.assigned.values())
