"""Backlog: what an instance has yet to do and holds, by the gateway's own count: exact between reports."""

from __future__ import annotations

from dataclasses import dataclass

from kllm.messages import EngineLoad


@dataclass(slots=True)
class _Entry:
    attempt: int
    tokens: int
    lacking: int
    pulling: int
    reported: bool = False


class Backlog:
    """Of the requests that an instance holds. All sums are kept, so that asking costs the same however many there are.

    holding: their tokens (prompts and outputs) as they were submitted. prefilling: tokens that those without output
    have to compute, prefills: how many those are. unreported: the part of prefilling that no report shows yet.
    pulling: tokens whose KV those without output take from other instances. foreign: requests that it holds for other
    gateways, as of the latest report.
    """

    def __init__(self) -> None:
        self.holding = self.prefilling = self.prefills = self.unreported = self.pulling = self.foreign = 0
        self._entries: dict[str, _Entry] = {}
        self._silent: dict[str, _Entry] = {}  # without output

    def add(self, request_id: str, attempt: int, tokens: int, lacking: int, pulling: int = 0) -> None:
        """It was submitted. tokens: that it has; lacking: that it has to compute first; pulling: that it takes."""
        self.forget(request_id)
        entry = self._entries[request_id] = self._silent[request_id] = _Entry(attempt, tokens, lacking, pulling)
        self.holding += tokens
        self.prefilling += entry.lacking
        self.unreported += entry.lacking
        self.pulling += pulling
        self.prefills += 1

    def has_output(self, request_id: str) -> None:
        entry = self._silent.pop(request_id, None)
        if entry is not None:
            self.prefilling -= entry.lacking
            self.unreported -= 0 if entry.reported else entry.lacking
            self.pulling -= entry.pulling
            self.prefills -= 1

    def forget(self, request_id: str) -> None:
        """It is not there any more."""
        self.has_output(request_id)
        entry = self._entries.pop(request_id, None)
        if entry is not None:
            self.holding -= entry.tokens

    def report(self, load: EngineLoad) -> None:
        """Its latest report, as it comes. Idle instances report without progress: then nothing of ours is there."""
        self.foreign = max(0, load.running + load.waiting - len(self._entries))
        progress = load.progress or {}
        for request_id, entry in self._silent.items():
            attempt, _ = progress.get(request_id, (-1, 0))
            if not entry.reported and attempt >= entry.attempt:
                entry.reported = True
                self.unreported -= entry.lacking

    def check(self) -> None:
        """Raise unless the sums are those of the entries."""
        silent = self._silent.values()
        assert self.holding == sum(entry.tokens for entry in self._entries.values())
        assert self.prefilling == sum(entry.lacking for entry in silent)
        assert self.unreported == sum(entry.lacking for entry in silent if not entry.reported)
        assert self.pulling == sum(entry.pulling for entry in silent)
        assert self.prefills == len(silent)
        assert all(self._entries[request_id] is entry for request_id, entry in self._silent.items())
