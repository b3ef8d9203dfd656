"""ProgressWatch: from an instance's reports of what it holds, which messages were lost on the way. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from kllm.cluster.request_stream import RequestStream

MISSING_REPORTS = 3  # in a row without a request: the submission, or the request's last output, did not arrive

Progress = Mapping[str, tuple[int, int]]  # request id -> (attempt, index of the next delta)


class ProgressWatch:
    """Of one incarnation. A link carries messages in any order, so a single report proves nothing: a request may be on
    its way there, or its output on its way here."""

    def __init__(self) -> None:
        self._last: Progress = {}
        self._missing: dict[str, tuple[int, int]] = {}  # request id -> (attempt, reports in a row without it)

    def astray(self, progress: Progress, assigned: Mapping[str, RequestStream]) -> list[tuple[RequestStream, str]]:
        """Requests that have to be submitted again, with the reason. To be called once for every report, in order."""
        found: list[tuple[RequestStream, str]] = []
        missing: dict[str, tuple[int, int]] = {}
        for request_id, stream in assigned.items():
            attempt = stream.attempt
            held = progress.get(request_id)
            if held is None or held[0] != attempt:
                before, count = self._missing.get(request_id, (attempt, 0))
                count = count + 1 if before == attempt else 1
                if count >= MISSING_REPORTS:
                    found.append((stream, f"the instance did not have it in {count} reports"))
                else:
                    missing[request_id] = (attempt, count)
                continue
            promised = self._last.get(request_id)
            if promised is not None and promised[0] == attempt and promised[1] > len(stream.outputs):
                found.append((stream, f"token {len(stream.outputs)} did not arrive, the instance is at {promised[1]}"))
        self._last, self._missing = progress, missing
        return found

    @staticmethod
    def strays(progress: Progress, assigned: Mapping[str, RequestStream]) -> list[tuple[str, int]]:
        """(request id, attempt) that the instance works on in vain: they have ended, or went elsewhere."""
        return [
            (request_id, attempt)
            for request_id, (attempt, _) in progress.items()
            if (stream := assigned.get(request_id)) is None or stream.attempt > attempt
        ]
