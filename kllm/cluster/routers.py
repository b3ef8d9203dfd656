"""Every router by its name."""

from __future__ import annotations

import random
from collections.abc import Callable

from kllm.cluster.cache_routing import CacheAware, DynamoCost, PrefixOnly, SGLangCacheAware
from kllm.cluster.routing import LeastLoaded, RoundRobin, Router
from kllm.config import RoutingName

ROUTERS: dict[RoutingName, Callable[[random.Random], Router]] = {
    "cache-aware": CacheAware,
    "least-loaded": LeastLoaded,
    "round-robin": lambda _: RoundRobin(),
    "prefix-only": PrefixOnly,
    "dynamo": DynamoCost,
    "sglang": SGLangCacheAware,
}
