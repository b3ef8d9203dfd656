"""`kllm serve` whose instances are mocks; what runs in this process is the real server and gateway.

python -m benchmarks.gateway.server SETTINGS        (SETTINGS: ServerSettings as JSON)
"""

from __future__ import annotations

import functools
import itertools
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec

import kllm.server.main as kllm_serve
from benchmarks.gateway.mock_instance import MockSettings
from benchmarks.gateway.sampling_profiler import SamplingProfiler
from kllm.config import EngineConfig, RoutingName, ServerConfig


class ServerSettings(msgspec.Struct, frozen=True):
    """step_s: of every instance; their steps are evenly apart. profile: file for the profile; "" for none."""

    model: str
    vocab_size: int
    instances: int
    routing: RoutingName
    step_s: float
    profile: str = ""


def main(settings: ServerSettings) -> None:
    numbers = itertools.count()

    def mock_command(address: str, config: EngineConfig) -> Sequence[str]:
        mock = MockSettings(
            step_s=settings.step_s,
            phase_s=settings.step_s * (next(numbers) % settings.instances) / settings.instances,
            vocab_size=settings.vocab_size,
            fingerprint="mock" if config.report_cache else "",
        )
        return (sys.executable, "-m", "benchmarks.gateway.mock_instance", address, msgspec.json.encode(mock).decode())

    kllm_serve.instance_command = mock_command  # the only difference from `kllm serve`
    serve = functools.partial(
        kllm_serve.serve,
        EngineConfig(model=settings.model),
        ServerConfig(port=0, instances=settings.instances, routing=settings.routing, max_queue=8192),
    )
    if not settings.profile:
        serve()
        return
    with SamplingProfiler() as profiler:
        serve()
    Path(settings.profile).write_bytes(msgspec.json.encode(profiler.profile()))


if __name__ == "__main__":
    main(msgspec.json.decode(sys.argv[1], type=ServerSettings))
