"""`kllm instance`: one instance that gateways, started elsewhere, come to."""

from __future__ import annotations

import os
import sys

from kllm.cli.options import Flags, ModelArgument, build, config_flags
from kllm.config import EngineConfig, ListenConfig


@config_flags(EngineConfig, ListenConfig)
def instance(model: ModelArgument, flags: Flags) -> None:
    """Run one instance of MODEL for gateways that come to it (`kllm gateway --config fleet.toml`)."""
    engine_config = build(EngineConfig, flags, model=model)
    listen = build(ListenConfig, flags)
    import asyncio

    from kllm.engine.listening import check_listening, serve_gateways
    from kllm.hub import resolve
    from kllm.telemetry.logs import configure_logs

    configure_logs(listen.log_level)
    check_listening(listen)
    resolve(engine_config.model)  # here, where its progress bar is seen
    asyncio.run(serve_gateways(engine_config, listen))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # threads that still compute for gateways that are gone must not hold the process
