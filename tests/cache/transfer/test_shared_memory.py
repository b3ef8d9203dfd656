"""Slots in shared memory: read by other processes of the same user, and gone with their owner however it ends."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence

import numpy as np
import pytest
from support.slot_owner import SlotOwner

from kllm.cache.transfer.opening import make_transfer
from kllm.cache.transfer.port import TransferError
from kllm.cache.transfer.shared_memory import SharedMemoryTransfer

PAGE = 4096
NOBODY = 65534


def read(
    transfer: SharedMemoryTransfer, address: str, theirs: Sequence[int], mine: Sequence[int], timeout_s: float = 10.0
) -> None:
    asyncio.run(transfer.read(address, theirs, mine, timeout_s))


def open_memory() -> set[str]:
    return {link for fd in os.listdir("/proc/self/fd") if "kllm-kv" in (link := _target(fd))}


def _target(fd: str) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{fd}")
    except OSError:
        return ""


def test_pages_of_another_process() -> None:
    transfer = SharedMemoryTransfer(8, PAGE)
    with SlotOwner("shm", 8, PAGE) as owner:
        read(transfer, owner.address, [2, 3, 4, 7, 0], [7, 0, 1, 2, 3])
        assert [int(page[0]) for page in transfer.slots] == [4, 5, 8, 1, 0, 0, 0, 3]
        assert all((page == page[0]).all() for page in transfer.slots)
        owner.stop()
        read(transfer, owner.address, [5], [5])  # its owner's time is not needed
        assert transfer.slots[5][0] == 6
        assert len(open_memory()) == 1, "a peer's memory is not held on to"
    asyncio.run(transfer.close())


def test_nothing_is_left_of_an_owner_that_was_killed() -> None:
    transfer = SharedMemoryTransfer(4, PAGE)
    before = set(os.listdir("/dev/shm"))
    with SlotOwner("shm", 4, PAGE) as owner:
        read(transfer, owner.address, [0], [0])
        owner.kill()
        with pytest.raises(TransferError, match="gone"):
            read(transfer, owner.address, [0], [0])
    assert set(os.listdir("/dev/shm")) <= before
    asyncio.run(transfer.close())
    with pytest.raises(TransferError):
        read(SharedMemoryTransfer(4, PAGE), transfer.address, [0], [0])


def test_untouched_slots_take_no_memory() -> None:
    with SlotOwner("shm", 1 << 20, 1 << 16) as owner:  # 64 GiB
        _, pid, fd, _ = owner.address.split(":")
        taken = os.stat(f"/proc/{pid}/fd/{fd}").st_blocks * 512
        assert taken <= 64 << 16
        transfer = SharedMemoryTransfer(4, 1 << 16)
        read(transfer, owner.address, [(1 << 20) - 1], [0])
        assert not transfer.slots[0].any()
        assert os.stat(f"/proc/{pid}/fd/{fd}").st_blocks * 512 <= 64 << 16, "reading takes none either"
        asyncio.run(transfer.close())


@pytest.mark.parametrize(
    "address",
    ["", "shm:1", "shm:1:2:../../etc", "mooncake:host:1:0", f"shm:999999999:3:{'0' * 32}", f"shm:1:1:{'0' * 32}"],
)
def test_an_address_of_something_else(address: str) -> None:
    transfer = SharedMemoryTransfer(4, PAGE)
    with pytest.raises(TransferError):
        read(transfer, address, [0], [0])
    asyncio.run(transfer.close())


def test_another_process_with_the_same_number_is_not_mistaken_for_the_owner() -> None:
    transfer, other = SharedMemoryTransfer(4, PAGE), SharedMemoryTransfer(4, PAGE)
    _, pid, fd, _ = transfer.address.split(":")
    forged = ":".join(["shm", pid, fd, other.address.split(":")[3]])
    with pytest.raises(TransferError, match="another process"):
        read(transfer, forged, [0], [0])
    for one in (transfer, other):
        asyncio.run(one.close())


def test_pages_that_are_not_there_and_time_that_is_over() -> None:
    transfer = SharedMemoryTransfer(4, PAGE)
    with SlotOwner("shm", 4, PAGE) as owner:
        with pytest.raises(TransferError, match="no such pages"):
            read(transfer, owner.address, [3, 4], [0, 1])
        with pytest.raises(TransferError, match="no such pages"):
            read(transfer, owner.address, [1 << 40], [0])
        with pytest.raises(TransferError):
            read(transfer, owner.address, [0], [0], timeout_s=0.0)
    asyncio.run(transfer.close())


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to be another user")
def test_memory_of_another_user_is_not_read() -> None:
    transfer = SharedMemoryTransfer(4, PAGE)
    with SlotOwner("shm", 4, PAGE, user=NOBODY) as owner, pytest.raises(TransferError, match="another user"):
        read(transfer, owner.address, [0], [0])
    asyncio.run(transfer.close())


def test_many_pages_at_once_are_as_right_as_one() -> None:
    """More than one system call takes."""
    transfer, other = SharedMemoryTransfer(1500, 64), SharedMemoryTransfer(1500, 64)
    other.slots[:] = (np.arange(1500) % 251)[:, None]
    read(transfer, other.address, range(1500), range(1499, -1, -1))
    assert (transfer.slots[::-1] == other.slots).all()
    for one in (transfer, other):
        asyncio.run(one.close())


def test_where_there_are_no_memfds_the_operator_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "memfd_create")
    with pytest.raises(ValueError, match="kv_transfer shm: no shared memory: this system has no memfds"):
        asyncio.run(make_transfer("shm", 4, 4096, "127.0.0.1"))
