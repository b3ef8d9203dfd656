"""What can be wrong with a question about costs. Messages are for users, in one line."""

from __future__ import annotations

from collections.abc import Iterable


class CostError(ValueError):
    """The combination asked for does not exist, does not fit or is not modelled."""


class UnknownNameError(CostError):
    """No preset of this name."""

    def __init__(self, kind: str, name: str, known: Iterable[str]) -> None:
        super().__init__(f"unknown {kind} {name!r}: known are {', '.join(known)}")


class DoesNotFitError(CostError):
    """Weights and activations leave no memory for KV."""
