"""`kllm gateway`: the API server over instances that were started elsewhere."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kllm.cli.errors import UsageError
from kllm.cli.options import Flags, build, config_flags, flag_name
from kllm.config import ServerConfig


@config_flags(ServerConfig)
def gateway(
    config: Annotated[Path, typer.Option("--config", help="fleet.toml: the model, and where its instances are.")],
    flags: Flags,
) -> None:
    """Serve the instances that fleet.toml names over an OpenAI-compatible HTTP API. Flags go before its [server]."""
    from kllm.cluster.fleet_config import LOCAL_FIELDS, read_fleet
    from kllm.server.fleet_main import serve_fleet

    for name in LOCAL_FIELDS:
        if name in flags:
            raise UsageError(f"{flag_name(name)}: instances of a fleet are started with `kllm instance`")
    fleet, key = read_fleet(config)
    server = build(ServerConfig, fleet.server.model_dump(exclude_unset=True) | flags)
    serve_fleet(config, fleet, key, server)
