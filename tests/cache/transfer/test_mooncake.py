"""Mooncake's transfer engine: pages of another process over TCP, and what becomes of a read when that is gone."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Iterator

import pytest
from support.slot_owner import SlotOwner

from kllm.cache.stores.mooncake_client import load_library
from kllm.cache.stores.store import StoreError
from kllm.cache.transfer.mooncake import MooncakeTransfer
from kllm.cache.transfer.port import TransferError

PAGE = 100_000


def why_missing() -> str:
    try:
        load_library("mooncake.engine")
    except StoreError as error:
        return str(error)
    return ""


MISSING = why_missing()
pytestmark = pytest.mark.skipif(bool(MISSING), reason=MISSING)


@pytest.fixture(scope="module")
def owner() -> Iterator[SlotOwner]:
    with SlotOwner("mooncake", 64, PAGE) as process:
        yield process


def test_pages_of_another_process(owner: SlotOwner) -> None:
    async def main() -> None:
        transfer = await MooncakeTransfer.open(64, PAGE, "127.0.0.1")
        await transfer.read(owner.address, range(64), range(63, -1, -1), 10.0)
        assert [int(page[0]) for page in transfer.slots] == list(range(64, 0, -1))
        assert all((page == page[0]).all() for page in transfer.slots)
        await transfer.close()
        await transfer.close()

    asyncio.run(main())


@pytest.mark.parametrize("address", ["", "shm:1:2:3", "mooncake:127.0.0.1:1:0", "mooncake:127.0.0.1:99999:10"])
def test_an_address_of_nobody(address: str) -> None:
    async def main() -> None:
        transfer = await MooncakeTransfer.open(4, PAGE, "127.0.0.1")
        with pytest.raises(TransferError):
            await transfer.read(address, [0], [0], 10.0)
        await transfer.close()

    asyncio.run(main())


def test_what_the_owner_has_not_registered_is_not_read(owner: SlotOwner) -> None:
    async def main() -> None:
        transfer = await MooncakeTransfer.open(4, PAGE, "127.0.0.1")
        with pytest.raises(TransferError, match="no such pages"):
            await transfer.read(owner.address, [64], [0], 10.0)
        await transfer.close()

    asyncio.run(main())


def test_an_owner_that_stands_still_and_then_dies() -> None:
    """A read ends at its deadline, though the library waits on, for a minute; afterwards no slot is written to."""

    async def main() -> None:
        transfer = await MooncakeTransfer.open(4, PAGE, "127.0.0.1")
        with SlotOwner("mooncake", 4, PAGE) as other:
            other.stop()
            with pytest.raises(TransferError, match="has not sent all"):
                await transfer.read(other.address, [0], [0], 0.2)
            with pytest.raises(TransferError, match="has not ended yet"):
                await transfer.read(other.address, [1], [1], 10.0)
            other.kill()
            reason = "has not ended yet"
            while "has not ended yet" in reason:  # until the library has noticed
                with pytest.raises(TransferError) as raised:
                    await transfer.read(other.address, [1], [1], 10.0)
                reason = str(raised.value)
                await asyncio.sleep(0.01)
            assert "does not answer" in reason
            assert not transfer.slots.any()
            await transfer.close()

    asyncio.run(main())


def test_an_owner_that_dies_after_a_read() -> None:
    async def main() -> None:
        transfer = await MooncakeTransfer.open(4, PAGE, "127.0.0.1")
        with SlotOwner("mooncake", 4, PAGE) as other:
            await transfer.read(other.address, [0], [0], 10.0)
            other.kill()
            with pytest.raises(TransferError, match="does not answer"):
                await transfer.read(other.address, [1], [1], 10.0)
            await transfer.close()

    asyncio.run(main())


def test_a_process_ends_while_a_read_hangs() -> None:
    script = (
        "import asyncio, sys\n"
        "from kllm.cache.transfer.mooncake import MooncakeTransfer\n"
        "from kllm.cache.transfer.port import TransferError\n"
        "async def main():\n"
        f"    transfer = await MooncakeTransfer.open(4, {PAGE}, '127.0.0.1')\n"
        "    try:\n"
        "        await transfer.read(sys.argv[1], [0], [0], 0.1)\n"
        "    except TransferError:\n"
        "        print('late', flush=True)\n"
        "asyncio.run(main())\n"
    )
    with SlotOwner("mooncake", 4, PAGE) as other:
        other.stop()
        command = [sys.executable, "-c", script, other.address]
        done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=30)
        assert done.stdout == "late\n"


def test_it_is_not_imported_before_it_is_wanted() -> None:
    script = "import kllm.cache.transfer.mooncake, sys; sys.exit('mooncake' in sys.modules)"
    subprocess.run([sys.executable, "-c", script], check=True)
