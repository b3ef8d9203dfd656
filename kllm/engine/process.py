"""The instance process: `python -m kllm.engine.process ADDRESS CONFIG`, CONFIG being its EngineConfig as JSON.

Dials the gateway at ADDRESS at once, reports the phases of its start, and serves until the gateway drains it or the
link closes. The link is its life line: when the gateway dies, the instance ends too. (An instance that outlives its
gateways listens instead: kllm.engine.listening.)
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
import sys
import time
import uuid

from kllm.cache.event_wire import open_publisher
from kllm.cache.stores.store import StoreError
from kllm.config import EngineConfig
from kllm.engine.cache_reports import CacheReporter, fan_out
from kllm.engine.event_feed import EventFeed
from kllm.engine.instance import ThreadWorkers, instance_main
from kllm.engine.loading import Engine, load_engine
from kllm.hub import resolve
from kllm.messages import Down, Failed, Hello, Starting, Up
from kllm.tokenization.tokenizer import load_tokenizer
from kllm.transport.link import Link, LinkClosed
from kllm.transport.zeromq import dial

logger = logging.getLogger(__name__)
EXIT_FAILED = 1


async def serve(address: str, config: EngineConfig) -> int:
    """Returns the exit code."""
    link: Link[Down, Up] = dial(address)
    try:
        feed = open_feed(config)
    except OSError as error:
        _tell(link, Failed(error=error.strerror or str(error)))
        link.close()
        return EXIT_FAILED
    try:
        return await run_instance(link, config, feed)
    finally:
        if feed is not None:
            feed.close()


def open_feed(config: EngineConfig) -> EventFeed | None:
    """Publishes from now on, if the config wants it. Raises OSError when it cannot bind."""
    publisher = None if config.kv_events_config is None else open_publisher(config.kv_events_config)
    return None if publisher is None else EventFeed(publisher)


async def run_instance(link: Link[Down, Up], config: EngineConfig, feed: EventFeed | None) -> int:
    """From loading to the end, which closes the link. Returns the exit code; what failed is told over the link."""
    loop = asyncio.get_running_loop()
    started = time.perf_counter()
    reporter = CacheReporter() if config.report_cache else None
    sink = fan_out(feed, reporter)

    def report(phase: str, fraction: float) -> None:
        loop.call_soon_threadsafe(_tell, link, Starting(phase=phase, fraction=fraction))

    def load() -> Engine:
        report("open model", 0.0)
        source = resolve(config.model, progress=False)
        tokenizer = load_tokenizer(source)
        opened = time.perf_counter()
        engine = load_engine(config, source, tokenizer, report, sink)
        engine.start_seconds = {"open model": round(opened - started, 3), **engine.start_seconds}
        return engine

    try:
        engine = await asyncio.to_thread(load)
    except Exception as error:  # whatever it is, the operator reads it at the gateway
        logger.debug("start failed", exc_info=True)
        message = str(error) if isinstance(error, (ValueError, OSError)) else f"{type(error).__name__}: {error}"
        _tell(link, Failed(error=message))
        link.close()
        return EXIT_FAILED
    gc.collect()
    gc.freeze()  # modules and weights stay: collections in the step loop need not walk them
    hello = Hello(
        instance_id=f"instance-{os.getpid()}",
        incarnation=uuid.uuid4().hex,
        model=config.model,
        max_model_len=engine.max_model_len,
        vocab_size=engine.vocab_size,
        num_blocks=engine.num_blocks,
        block_tokens=engine.block_tokens,
        chunk_tokens=config.chunk_tokens,
        max_num_seqs=config.max_num_seqs,
        start_seconds=engine.start_seconds,
        operators=engine.operators,
        fingerprint=engine.kv_spec.fingerprint if reporter is not None and config.enable_prefix_caching else "",
        role=config.role,
        transfers=config.kv_transfer != "off",
        page_bytes=engine.kv_spec.page_bytes() if config.kv_transfer != "off" else 0,
    )
    workers = ThreadWorkers()
    try:
        if config.stages:
            from kllm.engine.lower_tiers import open_tiers

            await open_tiers(config, engine.core, engine.kv_cache, engine.kv_spec, workers, sink)
    except (StoreError, ValueError) as error:
        _tell(link, Failed(error=str(error)))
        link.close()
        return EXIT_FAILED
    try:
        await instance_main(link, engine.core, engine.compiler, workers, hello, feed=feed, reporter=reporter)
    except Exception:
        logger.exception("the engine failed")
        return EXIT_FAILED
    return 0


def _tell(link: Link[Down, Up], message: Up) -> None:
    """Progress and last words: lost without harm if the gateway is gone."""
    try:
        link.send(message)
    except LinkClosed:
        pass


def main() -> None:
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(levelname)s instance %(message)s")
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the gateway decides when we end
    address, config = sys.argv[1:]
    code = asyncio.run(serve(address, EngineConfig.model_validate_json(config)))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # threads that still compute for a gateway that is gone must not hold the process


if __name__ == "__main__":
    main()
