"""Layout: how one instance spreads a model over its GPUs. Names such as tp8, tp8ep8, dp8ep8, dp2tp4ep8.

    tpT      every attention and MLP matrix is cut into T parts (heads, columns); T GPUs see every token
    dpD      D groups of T GPUs, each with its own requests and their KV; attention, dense MLPs and shared experts are
             copied to every group
    epE      routed experts are dealt out whole to all E = D * T GPUs; without it each is cut into T parts
    embedding and head are cut by vocabulary over all GPUs

What every GPU keeps under each of them, of GLM-5.2:

                       tp8            dp8ep8
    q, kv up, output   1/8            all
    q, kv down, index  all            all
    routed experts     1/8 of each    1/8 of them
    shared, dense      1/8            all
    KV                 all (latents)  1/8 of the requests
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from kllm.costs.errors import CostError
from kllm.costs.hardware import Hardware
from kllm.costs.model_specs import ModelSpec

_PART = re.compile(r"([a-z]+)(\d+)")
_NOT_MODELLED = {"pp": "pipeline", "cp": "context", "sp": "sequence", "dcp": "decode context"}
MAX_GPUS = 1024


@dataclass(frozen=True)
class Layout:
    """tp: GPUs that share every token. dp: groups of them with requests of their own. ep: GPUs over which whole
    experts are dealt out, or 1."""

    tp: int = 1
    dp: int = 1
    ep: int = 1

    @property
    def gpus(self) -> int:
        return self.tp * self.dp

    def __str__(self) -> str:
        parts = (("dp", self.dp, 1), ("tp", self.tp, 1 if self.dp > 1 else 0), ("ep", self.ep, 1))
        return "".join(f"{name}{size}" for name, size, least in parts if size > least)

    def kv_shards(self, model: ModelSpec) -> int:
        """Parts into which a token's KV is cut within its group; 1: every GPU of the group keeps all of it."""
        return min(self.tp, model.attention.kv_heads)

    def check(self, model: ModelSpec, hardware: Hardware) -> None:
        """Raises CostError if this model cannot be laid out so on this hardware, or nobody would."""
        heads, kv_heads = model.attention.heads, model.attention.kv_heads
        if heads % self.tp:
            raise CostError(f"{self}: {model.name} has {heads} heads, which {self.tp} GPUs cannot share evenly")
        if kv_heads > 1 and max(kv_heads, self.tp) % min(kv_heads, self.tp):
            raise CostError(f"{self}: {model.name} has {kv_heads} KV heads, which {self.tp} GPUs cannot share evenly")
        if self.tp > hardware.gpus_per_node:
            raise CostError(
                f"{self}: tensor parallelism over more than {hardware.name}'s node of "
                f"{hardware.gpus_per_node} is not modelled"
            )
        if self.gpus > hardware.gpus_per_node and hardware.nic_gb_s is None:
            raise CostError(f"{self}: {hardware.name} is one machine of {hardware.gpus_per_node}")
        if model.experts is None and (self.dp > 1 or self.ep > 1):
            raise CostError(f"{self}: {model.name} has no experts to share out; use tp, or more instances")
        if model.experts is not None and self.ep > 1 and model.experts.count % self.ep:
            raise CostError(f"{self}: {model.experts.count} experts cannot be dealt out evenly to {self.ep} GPUs")


def parse_layout(text: str) -> Layout:
    """Raises CostError with what is wrong with it."""
    sizes: dict[str, int] = {}
    position, lower = 0, text.lower()
    while match := _PART.match(lower, position):
        name, size = match[1], int(match[2][:9])
        position = match.end()
        if name in _NOT_MODELLED:
            raise CostError(f"layout {text!r}: {_NOT_MODELLED[name]} parallelism is not modelled")
        if name not in ("tp", "dp", "ep") or name in sizes or not 1 <= size <= MAX_GPUS:
            break
        sizes[name] = size
    else:
        if sizes and position == len(lower):
            return _checked(text, Layout(**sizes))
    raise CostError(f"layout {text!r}: not of the form tp8, tp8ep8, dp8ep8 or dp2tp4ep8")


def _checked(text: str, layout: Layout) -> Layout:
    if layout.ep > 1 and layout.ep != layout.gpus:
        raise CostError(f"layout {text!r}: experts are shared by all {layout.gpus} GPUs, so ep must be {layout.gpus}")
    if layout.dp > 1 and layout.ep == 1:
        raise CostError(
            f"layout {text!r}: groups that share nothing are instances of their own; dp needs ep{layout.gpus}"
        )
    return layout


def layouts_of(gpus: int, model: ModelSpec, hardware: Hardware) -> list[Layout]:
    """Every modelled layout on this many GPUs, widest tensor parallelism first."""
    found = []
    for tp in range(min(gpus, hardware.gpus_per_node), 0, -1):
        dp = gpus // tp
        layout = Layout(tp=tp, dp=dp, ep=gpus if dp > 1 else 1)
        try:
            layout.check(model, hardware)
        except CostError:
            continue
        if layout.gpus == gpus:
            found.append(layout)
    return found
