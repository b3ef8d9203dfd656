from __future__ import annotations

import asyncio

import pytest

from kllm.cache.tiers.host_pool import HostPool


@pytest.mark.parametrize("comes", [True, False])
@pytest.mark.parametrize("asked_first", [True, False])
def test_whoever_waits_for_a_block_hears_what_became_of_it(comes: bool, asked_first: bool) -> None:
    async def main() -> None:
        pool = HostPool(4)
        (block,) = pool.reserve([b"name"])
        arrival = block.arrived() if asked_first else None
        if comes:
            pool.publish([block])
        else:
            pool.discard([block])
        arrival = arrival or block.arrived()
        assert await asyncio.wait_for(arrival, 1.0) is comes
        pool.check()

    asyncio.run(main())
