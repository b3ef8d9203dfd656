"""The loads: two that the simulation is fitted to, and two that it has to predict."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from kllm.workload.arrivals import poisson_arrivals
from kllm.workload.generators import LengthRange, with_arrivals
from kllm.workload.sample import OWN, Sample


@dataclass(frozen=True)
class Load:
    """Independent random prompts. inputs, outputs: fewest and most tokens, all equally likely.

    Open: a Poisson process at `share` of the saturation rate for `seconds`. Closed: `clients` that each send their next
    request when the one before has ended, `requests` in all.
    fitted: the simulation is fitted to it; otherwise it is what the simulation has to predict.
    """

    name: str
    inputs: LengthRange
    outputs: LengthRange
    seed: int
    fitted: bool = False
    share: float = 0.0
    seconds: float = 0.0
    clients: int = 0
    requests: int = 0

    @property
    def closed(self) -> bool:
        return self.clients > 0

    def samples(self, rate: float, repeat: int = 0) -> list[Sample]:
        """rate: requests a second of an open load. Repeats differ where fitting gains from it: in A and B."""
        seed = self.seed + 100 * repeat if self.fitted else self.seed
        rng = np.random.default_rng([seed, 5])
        count = self.requests or max(4, round(rate * self.seconds))
        made = [
            Sample(
                (((OWN, index), int(rng.integers(*self.inputs, endpoint=True))),),
                int(rng.integers(*self.outputs, endpoint=True)),
            )
            for index in range(count)
        ]
        if self.closed:
            return [replace(made[i], after=i - self.clients if i >= self.clients else None) for i in range(count)]
        return with_arrivals(made, poisson_arrivals(rate, seed))


FULL = (
    Load("A", (64, 768), (16, 128), 11, fitted=True, share=0.4, seconds=40),
    Load("B", (64, 512), (32, 192), 12, fitted=True, share=0.7, seconds=40),
    Load("C", (128, 640), (24, 160), 23, share=0.55, seconds=45),
    Load("16 clients", (64, 512), (16, 128), 24, clients=16, requests=80),
)
QUICK = tuple(replace(load, seconds=6.0, requests=min(load.requests, 24)) for load in FULL)
PROBE = Load("probe", (64, 512), (16, 128), 15, clients=16, requests=40)
