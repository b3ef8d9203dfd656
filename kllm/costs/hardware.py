"""Hardware presets: what one accelerator (or this machine) can do at most, and where each number is from.

Bandwidths are in GB/s (10^9 bytes a second) and per direction, rates in dense TFLOP/s, memory in bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from kllm.costs.errors import UnknownNameError
from kllm.costs.formats import COMPUTED_IN

GIB = 1 << 30

_TABLE = "accelerator table of the project's control-plane reference"
_RESERVED = f"{_TABLE}: 3.5 GiB for the driver's context, collectives and captured graphs"
_ACTIVATIONS = "4 GB, as in the worked example of KV capacity for GLM-5.2"
_PRICE = "assumption, the order of on-demand cloud prices; give your own"
_CEILINGS = "docs/performance.md, measured ceilings of 2 cores"


@dataclass(frozen=True)
class Hardware:
    """One accelerator of a node of `gpus_per_node`; for processor "cpu" the machine is one accelerator.

    tflops: dense rate by precision, in 10^12 operations a second; absent: no instructions for it, or rate not known.
    nvlink_gb_s, nic_gb_s, pcie_gb_s: per accelerator; None where there is none.
    memory_fraction: of what is left beside `reserved_bytes`, the part that an engine plans with.
    activation_bytes: held back for activations and workspaces of a step.
    sources: of every number above, by field name. uncertain: fields whose numbers should not be relied on.
    """

    name: str
    processor: str
    memory_bytes: int
    memory_gb_s: float
    tflops: Mapping[str, float]
    nvlink_gb_s: float | None
    nic_gb_s: float | None
    pcie_gb_s: float | None
    gpus_per_node: int
    reserved_bytes: int
    memory_fraction: float
    activation_bytes: int
    dollars_per_hour: float
    sources: Mapping[str, str]
    uncertain: frozenset[str] = field(default_factory=frozenset)

    @property
    def usable_bytes(self) -> int:
        """Memory that an engine fills with weights, activations and KV."""
        return int((self.memory_bytes - self.reserved_bytes) * self.memory_fraction)

    def flops(self, precision: str) -> float:
        """Operations a second of products in `precision`, or in what it is unpacked to where that is missing."""
        return next(self.tflops[name] for name in COMPUTED_IN[precision] if name in self.tflops) * 1e12


_GPU_SOURCES = {
    "memory_bytes": _TABLE,
    "memory_gb_s": _TABLE,
    "tflops": f"{_TABLE}; int8: the vendor's data sheet, the same as fp8",
    "nvlink_gb_s": _TABLE,
    "nic_gb_s": _TABLE,
    "pcie_gb_s": _TABLE,
    "gpus_per_node": "the vendor's 8-GPU board",
    "reserved_bytes": _RESERVED,
    "memory_fraction": "0.9, the usual default of engines",
    "activation_bytes": _ACTIVATIONS,
    "dollars_per_hour": _PRICE,
}


def _gpu(
    name: str,
    gib: int,
    memory_gb_s: float,
    tflops: Mapping[str, float],
    *,
    nvlink: float,
    nic: float,
    pcie: float,
    dollars: float,
    sources: Mapping[str, str] | None = None,
    uncertain: tuple[str, ...] = (),
) -> Hardware:
    return Hardware(
        name=name,
        processor="gpu",
        memory_bytes=gib * GIB,
        memory_gb_s=memory_gb_s,
        tflops=tflops,
        nvlink_gb_s=nvlink,
        nic_gb_s=nic,
        pcie_gb_s=pcie,
        gpus_per_node=8,
        reserved_bytes=int(3.5 * GIB),
        memory_fraction=0.9,
        activation_bytes=4_000_000_000,
        dollars_per_hour=dollars,
        sources=_GPU_SOURCES | dict(sources or {}),
        uncertain=frozenset(("dollars_per_hour", "activation_bytes", *uncertain)),
    )


H100 = _gpu("h100", 80, 3350, {"bf16": 989, "fp8": 1978, "int8": 1978}, nvlink=450, nic=50, pcie=64, dollars=2.5)
H200 = _gpu("h200", 141, 4800, {"bf16": 989, "fp8": 1978, "int8": 1978}, nvlink=450, nic=50, pcie=64, dollars=3.5)
B200 = _gpu(
    "b200",
    180,
    7700,
    {"bf16": 2250, "fp8": 4500, "fp4": 9000},
    nvlink=900,
    nic=100,
    pcie=128,
    dollars=5.0,
    sources={"tflops": _TABLE},
)
B300 = _gpu(
    "b300",
    268,
    7750,
    {"bf16": 2250, "fp8": 4500, "fp4": 14000},
    nvlink=900,
    nic=100,
    pcie=128,
    dollars=6.0,
    sources={
        "tflops": _TABLE,
        "nic_gb_s": "assumption: one 800 Gbit/s adapter per GPU",
        "pcie_gb_s": "assumption: as B200",
    },
    uncertain=("nic_gb_s", "pcie_gb_s"),
)
H20 = _gpu(
    "h20",
    96,
    4000,
    {"bf16": 148, "fp8": 296, "int8": 296},
    nvlink=450,
    nic=50,
    pcie=64,
    dollars=1.5,
    sources={"nic_gb_s": "assumption: as H100", "pcie_gb_s": "assumption: as H100"},
    uncertain=("memory_bytes", "memory_gb_s", "tflops", "nvlink_gb_s", "nic_gb_s", "pcie_gb_s"),
)

THIS_MACHINE = Hardware(
    name="this-machine",
    processor="cpu",
    memory_bytes=23 * GIB,
    memory_gb_s=56,
    tflops={"bf16": 0.461, "int8": 0.922},
    nvlink_gb_s=None,
    nic_gb_s=None,
    pcie_gb_s=None,
    gpus_per_node=1,
    reserved_bytes=2 * GIB,
    memory_fraction=0.9,
    activation_bytes=250_000_000,
    dollars_per_hour=0.10,
    sources={
        "memory_bytes": "what the machine of docs/performance.md reports",
        "memory_gb_s": f"{_CEILINGS} of AMD EPYC (Zen 4), 1 GiB read by 2 threads; 15 to 57 as others use the host",
        "tflops": f"{_CEILINGS} of AMD EPYC (Zen 4), 2 threads: AVX-512 BF16 and VNNI",
        "gpus_per_node": "the machine is one accelerator",
        "reserved_bytes": "assumption: operating system and Python",
        "memory_fraction": "0.9, as for GPUs",
        "activation_bytes": "assumption",
        "dollars_per_hour": _PRICE,
    },
    uncertain=frozenset({"memory_bytes", "memory_gb_s", "reserved_bytes", "activation_bytes", "dollars_per_hour"}),
)

HARDWARE = {preset.name: preset for preset in (H100, H200, B200, B300, H20, THIS_MACHINE)}


def find_hardware(name: str) -> Hardware:
    """The preset of this name, whatever its case. Raises UnknownNameError."""
    try:
        return HARDWARE[name.lower()]
    except KeyError:
        raise UnknownNameError("hardware", name, HARDWARE) from None
