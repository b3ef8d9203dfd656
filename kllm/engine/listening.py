"""`kllm instance`: an instance that waits for gateways, serves any number of them, and outlives each.

It ends on SIGTERM or SIGINT, when what it has is finished or drain_timeout is over; a second signal ends it at once.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal

from kllm.config import EngineConfig, ListenConfig
from kllm.engine.process import open_feed, run_instance
from kllm.messages import Failed, Hello, Up
from kllm.transport.addresses import need_key, normalize
from kllm.transport.exchange_link import ExchangeLink
from kllm.transport.fleet_key import FleetKey, read_key
from kllm.transport.zeromq_peers import ZmqPeers

logger = logging.getLogger(__name__)


class InstanceEnded(RuntimeError):
    """The instance could not start or go on; the message is for the operator."""


def check_listening(config: ListenConfig) -> tuple[str, FleetKey | None]:
    """(address, key). Raises AddressError or KeyFileError."""
    address = normalize(config.listen)
    key = None if config.key_file is None else read_key(config.key_file)
    need_key(address, has_key=key is not None)
    return address, key


async def serve_gateways(config: EngineConfig, listen: ListenConfig) -> None:
    """Until it is told to end. Prints its address, and when it is ready, on standard output.

    Raises AddressError, KeyFileError, OSError (it cannot bind) or InstanceEnded."""
    address, key = check_listening(listen)
    feed = open_feed(config)
    try:
        peers = ZmqPeers(address, key)
        said = _LastWords(peers.address)
        link = ExchangeLink(peers, on_said=said)
        _end_on_signals(link, listen.drain_timeout)
        print(f"kLLM instance listens at {peers.address}", flush=True)
        # Any gateway may want to know what is cached, so it can be told; what nobody watches costs nothing.
        code = await run_instance(link, config.model_copy(update={"report_cache": True}), feed)
        if code:
            raise InstanceEnded(said.error or "the engine failed")
    finally:
        if feed is not None:
            feed.close()
        if address.startswith("ipc://"):
            _remove(address.removeprefix("ipc://"))


class _LastWords:
    """What the instance says that the operator should read here, too."""

    def __init__(self, address: str) -> None:
        self.error = ""
        self._address = address
        self._ready = False

    def __call__(self, message: Up) -> None:
        if isinstance(message, Failed):
            self.error = message.error
        elif isinstance(message, Hello) and not self._ready:
            self._ready = True
            print(f"kLLM instance is ready: {self._address} computes {message.model}", flush=True)


def _end_on_signals(link: ExchangeLink, timeout_s: float) -> None:
    loop = asyncio.get_running_loop()
    told = False

    def on_signal(number: int) -> None:
        nonlocal told
        if told:
            os._exit(128 + number)
        told = True
        logger.info("ending: %d gateways are told", link.exchange.gateways)
        link.drain()
        loop.call_later(timeout_s, link.close)

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal, number)


def _remove(path: str) -> None:
    try:
        os.unlink(path)
    except OSError:
        pass
