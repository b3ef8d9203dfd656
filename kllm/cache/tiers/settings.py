"""What an operator decides about the lower tiers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

WritePolicy = Literal["through", "selective", "back", "asked"]


@dataclass(frozen=True)
class TierSettings:
    """write: when blocks of L1 are copied to L2: as soon as they are computed (through), once `min_reuse` requests
    used them (selective), when they are about to be evicted (back), or only where others are to pull them (asked).
    store_min_reuse: requests that must have used a block before it goes from L2 to the store; 1: all blocks go.
    fetch_base_s, fetch_per_kilotoken_s: how long a request waits for what lies below, by its tokens below.
    staging: L2 is only what blocks pass through on their way to the store: they wait in L1 for their turn.
    predict: fetch only what is predicted to be cheaper than computing it; False: whatever is there.
    """

    write: WritePolicy = "through"
    min_reuse: int = 2
    store_min_reuse: int = 1
    fetch_base_s: float = 0.25
    fetch_per_kilotoken_s: float = 0.1
    staging: bool = False
    predict: bool = True

    @property
    def counts_uses(self) -> bool:
        return self.write == "selective" or self.store_min_reuse > 1

    @property
    def saves_coldest(self) -> bool:
        """Whether what L1 evicts next is copied to L2 if it is not there (any more)."""
        return self.write == "back" or (self.write == "through" and not self.staging)
