"""Engines that take long over a prompt, behind a gateway in virtual time."""

from __future__ import annotations

import pytest
from support.foreign_engine import continuation
from support.gateways import read
from support.scripted_instance import make_request
from support.virtual_engine import VirtualEngine, gateway_over
from support.virtual_time import run

from kllm.cluster.external.engine_metrics import EngineMetrics

WHOLE = continuation([1, 2, 3], 12)


@pytest.mark.parametrize("metrics", [None, EngineMetrics(block_tokens=4, num_blocks=500)])
def test_one_that_counts_no_steps_is_not_dead_as_long_as_it_says_it_is_well(
    monkeypatch: pytest.MonkeyPatch, metrics: EngineMetrics | None
) -> None:
    """Nothing but read_timeout limits how long it may compute a prompt."""

    async def main() -> None:
        engine = VirtualEngine()
        engine.told, engine.prefill_s = metrics, 100.0
        async with gateway_over(monkeypatch, engine, silence_limit=60.0) as gateway:
            streams = [gateway.generate(make_request(str(i), max_tokens=12)) for i in range(3)]
            for stream in streams:
                assert [token for delta in await read(stream) for token in delta.token_ids] == WHOLE
                assert stream.attempt == 0

    run(main())


def test_one_whose_count_of_steps_stands_still_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        hanging, well = VirtualEngine("http://a"), VirtualEngine("http://b")
        hanging.told, hanging.prefill_s = EngineMetrics(block_tokens=4, num_blocks=500, steps=5.0), 100.0
        async with gateway_over(monkeypatch, hanging, well, silence_limit=60.0) as gateway:
            gateway.slots[1].resting = True
            stream = gateway.generate(make_request(max_tokens=12))
            gateway.slots[1].resting = False
            assert [token for delta in await read(stream) for token in delta.token_ids] == WHOLE
            assert stream.attempt == 1
            assert well.asked[0][0] < 65.0

    run(main())
