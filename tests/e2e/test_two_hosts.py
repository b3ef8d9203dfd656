"""Prefill on one host, decoding on another, KV over Mooncake's transfer engine: requests on a slow link, and on one
that is cut in the middle of a transfer."""

from __future__ import annotations

import asyncio
import random
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from support.handover import InstanceEnd, greedy_request
from support.live_fleet import LiveInstance
from support.two_hosts import TwoHosts, why_not

from kllm.cache.stores.mooncake_client import load_library
from kllm.cache.stores.store import StoreError
from kllm.messages import Ping, Release, Submit
from kllm.telemetry.tier_counts import TierCounts
from kllm.transport.zeromq import dial_instance

ENGINE = ("--threads", "1", "--dtype", "float32", "--kernels", "invariant", "--num-kv-blocks", "300")
PATIENCE_S = 4.0  # of a request that waits for KV
TRANSFER = ("--kv-transfer", "mooncake", "--fetch", "always", "--fetch-base-s", str(PATIENCE_S))
HANG_S = 60.0  # beyond that: the machine may be busy
TOKENS, OUTPUT = 640, 8


def why_missing() -> str:
    try:
        load_library("mooncake.engine")
    except StoreError as error:
        return str(error)
    return why_not()


MISSING = why_missing()
pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(MISSING), reason=MISSING)]


def prompt(number: int) -> list[int]:
    rng = random.Random(number)
    return [rng.randrange(5, 250) for _ in range(TOKENS + 1)]


@dataclass
class Pair:
    """P and D of one test, and the cable between them."""

    hosts: TwoHosts
    p: InstanceEnd
    d: InstanceEnd
    numbers: Iterator[int]

    async def prefill(self) -> Submit:
        """A new request, as it is to go on at D."""
        number = next(self.numbers)
        request = greedy_request(number, prompt(number), OUTPUT)
        part = await self.p.submit(Submit(request=request, prefill_only=True))
        assert part.kv is not None
        return Submit(request=request, attempt=1, outputs=part.tokens, kv=part.kv)

    async def decode(self, submit: Submit) -> int:
        """Checks what D says against what P says alone. Prompt tokens that D did not compute."""
        part = await self.d.submit(submit)
        assert submit.kv is not None
        self.p.link.send(Release(leases=[submit.kv.lease]))
        whole = greedy_request(next(self.numbers), submit.request.prompt_token_ids, OUTPUT)
        assert submit.outputs + part.tokens == (await self.p.submit(Submit(request=whole))).tokens
        return part.cached

    async def counts(self) -> TierCounts:
        self.d.link.send(Ping())
        tiers = (await self.d.report()).tiers
        assert tiers is not None
        return tiers


@asynccontextmanager
async def pair(model: Path) -> AsyncIterator[Pair]:
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="kllm-"))
        hosts = stack.enter_context(TwoHosts())
        ends = []
        for index, role in enumerate(("prefill", "decode")):
            listen = f"ipc://{folder}/{role}"  # whatever happens to the cable, the gateway reaches both
            flags = ("--role", role, "--kv-transfer-host", hosts.addresses[index], "--listen", listen)
            instance = LiveInstance(model, *flags, *ENGINE, *TRANSFER, before=hosts.command(index))
            await asyncio.to_thread(stack.enter_context(instance).wait_ready)
            link = dial_instance(listen)
            stack.callback(link.close)
            link.send(Ping())
            ends.append(InstanceEnd(link))
        yield Pair(hosts, ends[0], ends[1], iter(range(1_000_000)))


def test_kv_crosses_a_slow_link(live_model: Path) -> None:
    async def main() -> None:
        async with pair(live_model) as both:
            both.hosts.limit("20mbit")
            sent = both.hosts.sent(0)
            for _ in range(3):
                assert await both.decode(await both.prefill()) == TOKENS, "D computed none of it"
            counts = await both.counts()
            assert (counts.pull_failures, counts.pulled) == (0, 3 * TOKENS // 16)
            assert both.hosts.sent(0) - sent >= counts.bytes_pulled

    asyncio.run(main())


def test_a_link_that_is_cut_in_the_middle_of_a_transfer(live_model: Path) -> None:
    """The request completes by computing again, and so does one that comes while it is down; then KV crosses again."""

    async def main() -> None:
        async with pair(live_model) as both:
            hosts = both.hosts
            assert await both.decode(await both.prefill()) == TOKENS
            submit = await both.prefill()
            hosts.limit("400kbit")
            sent, began = hosts.sent(0), time.monotonic()
            request = asyncio.ensure_future(both.decode(submit))
            while hosts.sent(0) - sent < 20_000:  # KV is on its way
                assert time.monotonic() - began < HANG_S
                await asyncio.sleep(0.01)
            hosts.cut()
            began = time.monotonic()
            assert await request == 0
            assert time.monotonic() - began < PATIENCE_S + HANG_S
            assert (await both.counts()).pull_failures == 1

            submit, began = await both.prefill(), time.monotonic()
            assert await both.decode(submit) == 0
            assert time.monotonic() - began < PATIENCE_S + HANG_S

            hosts.limit("1gbit")
            hosts.mend()
            while await both.decode(await both.prefill()) != TOKENS:  # until the library has noticed
                assert time.monotonic() - began < 3 * HANG_S

    asyncio.run(main())
