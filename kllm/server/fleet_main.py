"""`kllm gateway --config fleet.toml`: the gateway and the HTTP server, over instances that were started elsewhere.

Nothing that it holds outlives it: a second gateway over the same instances, or this one after a crash, learns from them
what they have. SIGHUP reads the file again: instances join and leave; the rest of it holds from the next start on.
"""

from __future__ import annotations

import asyncio
import logging
import random
import signal
import socket
from pathlib import Path

from kllm.cluster.fleet_config import FleetConfig, FleetConfigError, read_fleet
from kllm.cluster.membership import Membership, make_launcher
from kllm.cluster.pool_routing import GlobalPools, PoolSettings
from kllm.cluster.routers import ROUTERS
from kllm.config import ServerConfig
from kllm.hub import resolve
from kllm.server.main import bind, make_gateway, serve_gateway, start_listening
from kllm.server.start_display import StartDisplay
from kllm.telemetry.logs import configure_logs
from kllm.transport.fleet_key import FleetKey

logger = logging.getLogger("kllm.server")


def serve_fleet(path: Path, fleet: FleetConfig, key: FleetKey | None, config: ServerConfig) -> None:
    """Serve until SIGTERM or SIGINT, while no instance is there, too. config: the file's [server] with what goes before
    it. Raises ServeError or ModelSourceError."""
    import uvloop

    configure_logs(config.log_level)
    loop = asyncio.Runner(loop_factory=uvloop.new_event_loop)
    with bind(config.host, config.port) as listener, loop as runner:
        runner.run(_serve(path, fleet, key, config, listener))


async def _serve(
    path: Path, fleet: FleetConfig, key: FleetKey | None, config: ServerConfig, listener: socket.socket
) -> None:
    source = await asyncio.to_thread(resolve, fleet.model)
    start_listening(listener, config)
    rng = random.Random()
    display = StartDisplay(len(fleet.entries))
    launchers = [make_launcher(entry, key) for entry in fleet.entries]
    pools = GlobalPools(rng, PoolSettings(tpot_slo_s=config.slo_tpot_s))
    gateway = make_gateway(launchers, config, rng, ROUTERS[config.routing](rng), pools, display)
    changes: set[asyncio.Task[None]] = set()
    membership = Membership(gateway, fleet)

    def reload() -> None:
        task = asyncio.create_task(_reload(path, fleet, membership))
        changes.add(task)
        task.add_done_callback(changes.discard)

    asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, reload)
    try:
        await serve_gateway(gateway, source, fleet.model, config, listener, display)
    finally:
        for task in changes:
            task.cancel()
        await asyncio.gather(*changes, return_exceptions=True)


async def _reload(path: Path, started_with: FleetConfig, membership: Membership) -> None:
    try:
        fleet, key = await asyncio.to_thread(read_fleet, path)
        if (fleet.model, fleet.server) != (started_with.model, started_with.server):
            logger.warning("%s: model and [server] hold from the next start on", path)
        await membership.change(fleet.entries, key)
    except FleetConfigError as error:
        logger.error("everything stays as it is: %s", error)
    except ValueError as error:
        logger.error("%s: %s", path, error)
