"""The KvTransfer port: an instance's slots of L2, reachable by other instances, and its way to theirs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class TransferError(RuntimeError):
    """Pages could not be read: the peer is gone, cannot be reached, or took too long. For the log."""


class KvTransfer(Protocol):
    """Reads pages of other instances into slots of this one, which lie in memory that it knows.

    address: how others reach the slots of this instance, as KvSource.address. It is worth nothing to them once this
    instance has ended. Nobody writes to another's slots. A read takes no part of the owner's time, and nothing keeps
    the owner from writing there meanwhile: whoever reads compares checksums.
    """

    address: str

    async def read(self, address: str, theirs: Sequence[int], mine: Sequence[int], timeout_s: float) -> None:
        """Their page theirs[i] into slot mine[i], for all i. Off the event loop's thread.

        Raises TransferError when not all have come within timeout_s seconds. Once it has raised or was cancelled,
        nothing is written to these slots any more; what they hold then is undefined."""
        ...

    async def close(self) -> None:
        """Others cannot reach the slots from now on. Idempotent."""
        ...
