"""`kllm serve`: instance processes, the gateway and the HTTP server, from start to drained end.

    bind port ─► find model ─► start instance processes ──────────────────────────► Hello ─► "ready"
                               └► meanwhile: import the web stack, load the tokenizer, answer /health, /ready (503)

The instances take longest, so nothing is imported or loaded here before it runs.
"""

from __future__ import annotations

import asyncio
import functools
import gc
import logging
import os
import random
import signal
import socket
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from kllm.cluster.gateway import Gateway, InstanceFailed
from kllm.cluster.launchers.launcher import InstanceLauncher
from kllm.cluster.launchers.local import LocalLauncher
from kllm.cluster.pool_routing import GlobalPools, PoolPolicy, PoolSettings
from kllm.cluster.routers import ROUTERS
from kllm.cluster.routing import Router
from kllm.cluster.slo_snapshot import SloLimits
from kllm.config import KV_CACHE_SHARE, EngineConfig, ServerConfig
from kllm.hub import ModelSource, resolve
from kllm.messages import Hello
from kllm.resources import available_cores, available_memory
from kllm.server.start_display import StartDisplay
from kllm.telemetry.logs import configure_logs, fields

if TYPE_CHECKING:
    from kllm.server.http_server import HttpServer
    from kllm.server.service import Service

logger = logging.getLogger("kllm.server")

BACKLOG = 2048
LOOPBACK = ("127.0.0.1", "::1", "localhost")


class ServeError(RuntimeError):
    """The server cannot start; the message is for the operator."""


def serve(engine_config: EngineConfig, server_config: ServerConfig) -> None:
    """Serve until SIGTERM or SIGINT; returns when everything accepted has ended and the instances are gone.

    A second signal ends without waiting. Raises ServeError (port in use, no instance can start) or ModelSourceError.
    """
    import uvloop

    configure_logs(server_config.log_level)
    loop = asyncio.Runner(loop_factory=uvloop.new_event_loop)
    with bind(server_config.host, server_config.port) as listener, loop as runner:
        runner.run(_serve(engine_config, server_config, listener))


def bind(host: str, port: int) -> socket.socket:
    """A bound socket. Raises ServeError."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
        except BaseException:
            listener.close()
            raise
    except OSError as error:
        raise ServeError(f"cannot listen on {host} port {port}: {error.strerror}") from error
    return listener


async def _serve(engine_config: EngineConfig, config: ServerConfig, listener: socket.socket) -> None:
    source = await asyncio.to_thread(resolve, engine_config.model)
    start_listening(listener, config)
    roles = config.roles
    display = StartDisplay(len(roles))
    rng = random.Random()
    cores, memory = available_cores(), available_memory()
    router = ROUTERS[config.routing](rng)
    pools = GlobalPools(rng, PoolSettings(tpot_slo_s=config.slo_tpot_s)) if config.prefill else None
    if router.uses_cache or pools is not None:
        engine_config = engine_config.model_copy(update={"report_cache": True})
    if pools is not None:
        engine_config = with_transfer(engine_config)
    configs = [
        instance_config(engine_config.model_copy(update={"role": role}), index, len(roles), cores, memory)
        for index, role in enumerate(roles)
    ]
    launchers = [LocalLauncher(functools.partial(instance_command, config=each)) for each in configs]
    gateway = make_gateway(launchers, config, rng, router, pools, display)
    await serve_gateway(gateway, source, engine_config.model, config, listener, display)


def make_gateway(
    launchers: Sequence[InstanceLauncher],
    config: ServerConfig,
    rng: random.Random,
    router: Router,
    pools: PoolPolicy | None,
    display: StartDisplay,
) -> Gateway:
    """As the config says. pools: None where no instance has a role of its own."""
    return Gateway(
        launchers,
        rng=rng,
        router=router,
        pools=pools,
        slo=SloLimits(config.slo_ttft_s, config.slo_tpot_s),
        degrade=config.degrade,
        max_queue=config.max_queue,
        start_timeout=config.start_timeout,
        max_restarts=config.max_restarts,
        on_starting=display.update,
    )


def start_listening(listener: socket.socket, config: ServerConfig) -> None:
    """Raises ServeError."""
    try:
        listener.listen(BACKLOG)
    except OSError as error:
        raise ServeError(f"cannot listen on {config.host} port {config.port}: {error.strerror}") from error


async def serve_gateway(
    gateway: Gateway,
    source: ModelSource,
    model: str,
    config: ServerConfig,
    listener: socket.socket,
    display: StartDisplay,
) -> None:
    """From the gateway's start to its drained end. source, model: whose tokenizer it uses. Raises ServeError."""
    stop = _stop_signals()
    starting = asyncio.create_task(gateway.start())
    try:
        http, service = await asyncio.to_thread(_web_stack, gateway, source, config, model)
        serving = asyncio.create_task(http.serve([listener]))
        try:
            await _first(starting, serving, stop)
            display.close()
            if starting.done():
                _announce(_started(starting), service, config, listener, len(gateway.slots))
                await _first(serving, stop)
            service.draining = True
            await _drain(gateway, starting, config.drain_timeout)
        finally:
            http.stop()
            await serving
            service.close()
    finally:
        display.close()
        starting.cancel()
        await asyncio.gather(starting, return_exceptions=True)
        await gateway.close()


def with_transfer(config: EngineConfig) -> EngineConfig:
    """The configuration of instances that hand KV over. Raises ServeError."""
    if not config.enable_prefix_caching:
        raise ServeError("instances hand cached prefixes over, so --prefill and --decode need enable_prefix_caching")
    return config if config.kv_transfer != "off" else config.model_copy(update={"kv_transfer": "shm"})


def instance_config(config: EngineConfig, index: int, instances: int, cores: int, memory: int) -> EngineConfig:
    """The configuration of one of several instances: by default it gets its share of the cores and bytes of memory that
    this machine has to give. Raises ServeError."""
    if instances == 1:
        return config
    if config.bind_threads:
        raise ServeError("bind_threads would bind the threads of every instance to the same cores: use one instance")
    own: dict[str, object] = {}
    if config.threads is None:
        own["threads"] = max(1, cores // instances)
    if config.kv_cache_memory is None and config.num_kv_blocks is None:
        own["kv_cache_memory"] = max(1, int(memory * KV_CACHE_SHARE) // instances)
    if config.record_steps is not None:
        own["record_steps"] = config.record_steps.with_stem(f"{config.record_steps.stem}-{index}")
    if config.kv_events_config is not None and config.publishes_events:
        try:
            own["kv_events_config"] = config.kv_events_config.for_instance(index, instances)
        except ValueError as error:
            raise ServeError(f"kv_events_config: {error}") from error
    return config.model_copy(update=own)


def instance_command(address: str, config: EngineConfig) -> Sequence[str]:
    return (sys.executable, "-m", "kllm.engine.process", address, config.model_dump_json())


def _web_stack(gateway: Gateway, source: ModelSource, config: ServerConfig, model: str) -> tuple[HttpServer, Service]:
    """In a thread, while the instance starts: the imports alone take half a second. Raises ModelSourceError."""
    from kllm.server.app import create_app
    from kllm.server.http_server import HttpServer
    from kllm.tokenization.chat_template import ChatTemplate
    from kllm.tokenization.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(source)
    template = tokenizer.chat_template
    if config.chat_template is not None:
        try:
            with open(config.chat_template, encoding="utf-8") as file:
                template = file.read()
        except (OSError, UnicodeDecodeError) as error:
            raise ServeError(f"the chat template {config.chat_template} cannot be read: {error}") from error
    chat = ChatTemplate(template, tokenizer.bos_token, tokenizer.eos_token)
    names = config.served_model_name or [model]
    app = create_app(gateway, tokenizer, config, names, chat, root=model)
    gc.collect()
    gc.freeze()  # modules and the vocabulary stay: collections need not walk them while requests wait
    return HttpServer(app), app.state.service


def _stop_signals() -> asyncio.Event:
    """Set by the first SIGTERM or SIGINT; the second ends the process at once, and with it the instance's link."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()

    def on_signal(number: int) -> None:
        if stop.is_set():
            os._exit(128 + number)
        stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal, number)
    return stop


async def _first(*what: asyncio.Task[object] | asyncio.Task[Hello] | asyncio.Task[None] | asyncio.Event) -> None:
    """Returns when a task is done or an event is set."""
    waits = [asyncio.ensure_future(item.wait()) for item in what if isinstance(item, asyncio.Event)]
    tasks = [item for item in what if not isinstance(item, asyncio.Event)]
    try:
        await asyncio.wait((*tasks, *waits), return_when=asyncio.FIRST_COMPLETED)
    finally:
        for wait in waits:
            wait.cancel()


def _started(starting: asyncio.Task[Hello]) -> Hello:
    try:
        return starting.result()
    except InstanceFailed as error:
        raise ServeError(f"the model could not be started: {error}") from error


async def _drain(gateway: Gateway, starting: asyncio.Task[Hello], timeout_s: float) -> None:
    if starting.done():
        logger.info("draining", extra=fields(in_flight=gateway.in_flight, timeout_s=timeout_s))
        await gateway.drain(timeout_s)


def _announce(hello: Hello, service: Service, config: ServerConfig, listener: socket.socket, count: int) -> None:
    """The one line on standard output."""
    host, port = listener.getsockname()[:2]
    if config.host not in LOOPBACK and not config.api_key:
        logger.warning("anyone who reaches this address can use the model: set api_key", extra=fields(host=config.host))
    url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
    phases = ", ".join(f"{name} {seconds:.2f} s" for name, seconds in hello.start_seconds.items())
    spent = f" in {process_age():.2f} s ({phases})" if phases else f" in {process_age():.2f} s"
    operators = f", {hello.operators} operators" if hello.operators else ""
    instances = f" {count} instances," if count > 1 else ""
    print(f"kLLM is ready: {url} serves {service.model_names[0]},{instances}{spent}{operators}", flush=True)


def process_age() -> float:
    """Seconds since this process started; where the system does not tell, since this module was imported."""
    try:
        with open("/proc/self/stat", encoding="ascii", errors="replace") as file:
            ticks = int(file.read().rpartition(")")[2].split()[19])
        return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError, AttributeError):
        return time.perf_counter() - _IMPORTED


_IMPORTED = time.perf_counter()
