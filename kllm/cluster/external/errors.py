"""What can go wrong with an external engine, by what is to be done about it."""

from __future__ import annotations


class EngineUnavailable(Exception):
    """It does not answer, or not well: it may be starting, or gone. certain: nobody listens at its address."""

    def __init__(self, message: str, *, certain: bool = False) -> None:
        super().__init__(message)
        self.certain = certain


class EngineUnusable(Exception):
    """It answers, but cannot serve behind a gateway; the message is for the operator."""


class EngineBusy(Exception):
    """It takes no more requests now. retry_after_s: what it says, 0 if it does not."""

    def __init__(self, message: str, retry_after_s: float = 0.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class EngineFault(Exception):
    """It has failed this request, which may go better a second time or elsewhere. status: of HTTP, where it is one."""

    def __init__(self, message: str, *, status: int = 0) -> None:
        super().__init__(message)
        self.status = status


class NoTokenIds(EngineFault):
    """Its answers do not say which tokens it has sampled."""
