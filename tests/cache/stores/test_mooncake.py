"""MooncakeStore with a real mooncake_master, and with other processes' memory."""

from __future__ import annotations

import asyncio
import ctypes
import itertools
import socket
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import pytest
from support.mooncake_master import MooncakeMaster, kill, stop
from support.mooncake_peer import PAGE, Peer, get, key, put

from kllm.cache.stores import mooncake_client
from kllm.cache.stores.mooncake import MooncakeStore
from kllm.cache.stores.store import StoreError

LIMIT_S = 15.0  # that MooncakeClient promises
SEGMENT = 16 << 20


def why_missing() -> str:
    try:
        mooncake_client._load()
    except StoreError as error:
        return str(error)
    return ""


MISSING = why_missing()
needs_mooncake = pytest.mark.skipif(MISSING != "", reason=f"{MISSING} (or: make mooncake)")


@pytest.fixture(scope="module")
def master() -> Iterator[MooncakeMaster]:
    with MooncakeMaster() as master:
        yield master


@pytest.fixture(scope="module")
def store(master: MooncakeMaster) -> Iterator[MooncakeStore]:
    store = asyncio.run(MooncakeStore.connect(master.address, PAGE, segment_bytes=SEGMENT))
    yield store
    asyncio.run(store.close())
    asyncio.run(store.close())  # again


@pytest.fixture
def empty(store: MooncakeStore) -> MooncakeStore:
    asyncio.run(store.clear())
    return store


async def within_limit(call: Awaitable[Any]) -> Any:
    """The answer, or the error of the store. It must not take longer than it may."""
    began = time.monotonic()
    try:
        return await call
    except StoreError as error:
        return error
    finally:
        assert time.monotonic() - began < LIMIT_S


async def once_it_works(call: Callable[[], Awaitable[Any]]) -> Any:
    """The first answer that is no error."""
    began = time.monotonic()
    while isinstance(answer := await within_limit(call()), StoreError):
        assert time.monotonic() - began < LIMIT_S, answer
        await asyncio.sleep(0.05)
    return answer


def library_of(store: MooncakeStore) -> Any:
    return store._client._library


def put_object(store: MooncakeStore, name: str, content: bytes) -> None:
    memory = (ctypes.c_char * len(content)).from_buffer_copy(content)
    assert library_of(store).batch_put_from([name], [ctypes.addressof(memory)], [len(content)]) == [0]


def get_object(store: MooncakeStore, name: str, size: int) -> bytes:
    memory = (ctypes.c_char * size)()
    assert library_of(store).batch_get_into([name], [ctypes.addressof(memory)], [size]) == [size]
    return memory.raw


# -- contents ----------------------------------------------------------------------------------------------------


@needs_mooncake
def test_pages_come_back_as_they_were_put(empty):
    before = empty.counts.bytes_written, empty.counts.bytes_read
    numbers = list(range(40))  # more than one call of the library
    assert asyncio.run(put(empty, numbers)) == 40
    assert asyncio.run(get(empty, numbers[::-1])) == numbers[::-1]
    assert empty.counts.bytes_written - before[0] == empty.counts.bytes_read - before[1] == 40 * PAGE


@needs_mooncake
def test_nothing_is_asked_or_given(empty):
    assert asyncio.run(empty.exists([])) == 0
    assert asyncio.run(empty.get([], [])) == []
    assert asyncio.run(empty.put([], [])) == 0


@needs_mooncake
def test_what_is_not_there(empty):
    asyncio.run(put(empty, [1, 3]))
    assert asyncio.run(get(empty, [0, 1, 2, 3])) == [1, 3]
    assert asyncio.run(empty.exists([key(number) for number in (1, 3, 2, 1)])) == 2
    assert asyncio.run(empty.exists([key(2), key(1)])) == 0


@needs_mooncake
def test_what_is_there_is_not_written_again(empty):
    assert asyncio.run(put(empty, [1, 2, 1])) == 2
    assert asyncio.run(put(empty, [2, 3])) == 1


@needs_mooncake
def test_pages_of_another_size_are_refused(empty):
    with pytest.raises(ValueError, match="65536 bytes in one piece, not 65535"):
        asyncio.run(empty.put([b"k"], [memoryview(bytes(PAGE - 1))]))
    with pytest.raises(ValueError, match="2 keys for 1 pages"):
        asyncio.run(empty.get([b"k", b"l"], [memoryview(bytearray(PAGE))]))


@needs_mooncake
def test_a_damaged_page_is_counted_and_not_returned(empty):
    asyncio.run(put(empty, [1]))
    name = mooncake_client.PREFIX + key(1).hex()
    whole = get_object(empty, name, PAGE + 8)
    flipped = bytearray(whole)
    flipped[100] ^= 4
    for damaged in (bytes(flipped), whole[:-8] + bytes(8), whole + b"longer"):
        asyncio.run(empty.clear())
        before = empty.counts.corrupt
        put_object(empty, name, damaged)
        assert asyncio.run(get(empty, [1])) == []
        assert empty.counts.corrupt == before + 1


@needs_mooncake
def test_a_whole_page_of_another_key_is_damage(empty):
    """As when memory is used for another page while it is read."""
    asyncio.run(put(empty, [1]))
    content = get_object(empty, mooncake_client.PREFIX + key(1).hex(), PAGE + 8)
    put_object(empty, mooncake_client.PREFIX + key(2).hex(), content)
    before = empty.counts.corrupt
    assert asyncio.run(get(empty, [1, 2])) == [1]
    assert empty.counts.corrupt == before + 1


@needs_mooncake
def test_clearing_takes_only_our_pages(empty):
    asyncio.run(put(empty, range(20)))
    put_object(empty, "somebody/else", b"content")
    asyncio.run(empty.exists([key(1)]))  # it is leased
    asyncio.run(empty.clear())
    assert asyncio.run(get(empty, range(20))) == []
    assert get_object(empty, "somebody/else", 7) == b"content"
    library_of(empty).remove("somebody/else", True)


@needs_mooncake
def test_a_call_nobody_waits_for_ends(empty):
    async def main() -> None:
        call = asyncio.ensure_future(put(empty, range(100)))
        await asyncio.sleep(0)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        await empty.idle()
        assert len(await get(empty, range(100))) < 100

    asyncio.run(main())


# -- two processes -----------------------------------------------------------------------------------------------


@needs_mooncake
def test_processes_share_pages_and_are_quiet(empty, master):
    with Peer(master.address, 0) as peer:  # all is in our memory
        assert peer.ask("put", list(range(40))) == 40
        assert asyncio.run(get(empty, range(50))) == list(range(40))
        asyncio.run(put(empty, [41]))
        assert peer.ask("get", [39, 40, 41]) == [39, 41]
        lines = peer.close().splitlines()
    assert peer.process.returncode == 0
    assert [line for line in lines if not line.startswith(("E", "WARNING: Logging before"))] == []


# -- faults ------------------------------------------------------------------------------------------------------


@needs_mooncake
def test_a_killed_master_is_an_error_and_works_again_after_its_restart():
    answers: list[Any] = []

    async def use(store: MooncakeStore, numbers: range, busy: asyncio.Event) -> StoreError:
        for call in itertools.cycle((put, get)):
            answer = await within_limit(call(store, numbers))
            if isinstance(answer, StoreError):
                return answer
            answers.append(answer)
            if len(answers) == 40:
                busy.set()
        raise AssertionError

    async def main() -> None:
        with MooncakeMaster() as master:
            store = await MooncakeStore.connect(master.address, PAGE, segment_bytes=SEGMENT)
            busy = asyncio.Event()
            users = [asyncio.ensure_future(use(store, range(i, i + 5), busy)) for i in range(0, 20, 5)]
            await busy.wait()
            master.kill()
            for error in await asyncio.gather(*users):
                assert "the master does not answer" in str(error), error
            master.start()
            assert await once_it_works(lambda: put(store, range(5))) == 5
            assert await get(store, range(20)) == list(range(5))
            await store.close()

    asyncio.run(main())


@needs_mooncake
def test_a_master_that_hangs_is_an_error_in_time():
    async def main() -> None:
        with MooncakeMaster() as master:
            store = await MooncakeStore.connect(master.address, PAGE, segment_bytes=SEGMENT)
            await put(store, [1])
            master.pause()
            calls = [store.exists([key(1)]), get(store, [1]), put(store, [2])]
            for answer in await asyncio.gather(*map(within_limit, calls)):
                assert "does not answer" in str(answer), answer
            master.resume()
            assert await once_it_works(lambda: get(store, [1])) == [1]
            await store.close()

    asyncio.run(main())


@needs_mooncake
def test_a_holder_of_pages_that_is_gone_is_an_error_in_time():
    async def lose(fault: Callable[[Any], None]) -> None:
        with MooncakeMaster("--client_ttl=2") as master, Peer(master.address, SEGMENT) as peer:
            store = await MooncakeStore.connect(master.address, PAGE, segment_bytes=0)
            assert await put(store, range(20)) == 20
            fault(peer.process)
            answer = await within_limit(get(store, range(20)))
            assert "a host that holds pages does not answer" in str(answer), (fault, answer)
            # The master notices, and then they are gone.
            assert await once_it_works(lambda: get(store, range(20))) == [], fault
            await store.close()

    async def main() -> None:
        await asyncio.gather(lose(stop), lose(kill))

    asyncio.run(main())


@needs_mooncake
def test_a_segment_that_is_full_is_an_error(empty):
    numbers = range(SEGMENT // PAGE + 10)
    error = asyncio.run(within_limit(put(empty, numbers)))
    assert "no room for a page of 65,536 bytes" in str(error), error
    there = asyncio.run(get(empty, numbers))
    assert len(there) > 100
    asyncio.run(empty.clear())
    assert asyncio.run(put(empty, range(5))) == 5


@needs_mooncake
def test_a_segment_that_mooncake_does_not_take_is_an_error(master):
    with pytest.raises(StoreError, match="16,777,216 bytes or more, or 0, not 1,048,576"):
        asyncio.run(MooncakeStore.connect(master.address, PAGE, segment_bytes=1 << 20))


@needs_mooncake
def test_without_any_memory_there_is_no_room():
    async def main() -> None:
        with MooncakeMaster() as master:
            store = await MooncakeStore.connect(master.address, PAGE, segment_bytes=0)
            assert "no room" in str(await within_limit(put(store, [1])))
            assert await get(store, [1]) == []
            await store.close()

    asyncio.run(main())


@needs_mooncake
def test_a_master_that_never_answers_is_not_connected_to():
    with socket.create_server(("127.0.0.1", 0)) as silent:
        master = f"127.0.0.1:{silent.getsockname()[1]}"
        error = asyncio.run(within_limit(MooncakeStore.connect(master, PAGE)))
    assert "could not be set up" in str(error), error


# -- without Mooncake --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("master", "why"),
    [
        ("localhost", "HOST:PORT, not 'localhost'"),
        (":50051", "HOST:PORT"),
        ("host:port", "HOST:PORT"),
        ("host:70000", "HOST:PORT"),
        ("127.0.0.1:1", "cannot connect to mooncake_master at 127.0.0.1:1"),
    ],
)
def test_masters_that_cannot_be_reached(master, why):
    with pytest.raises(StoreError, match=why):
        asyncio.run(MooncakeStore.connect(master, PAGE))


def test_it_is_not_imported_before_it_is_wanted():
    script = "import kllm.cache.stores.mooncake, sys; sys.exit('mooncake' in sys.modules)"
    subprocess.run([sys.executable, "-c", script], check=True)


def test_a_missing_package_or_library_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "mooncake", None)
    monkeypatch.setitem(sys.modules, "mooncake.store", None)
    with pytest.raises(StoreError, match=r"pip install 'kllm\[mooncake\]'"):
        mooncake_client._load()
    (tmp_path / "mooncake").mkdir()
    (tmp_path / "mooncake" / "__init__.py").touch()
    (tmp_path / "mooncake" / "store.py").write_text("raise ImportError('libibverbs.so.1: cannot open')")
    monkeypatch.delitem(sys.modules, "mooncake")
    monkeypatch.delitem(sys.modules, "mooncake.store")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(StoreError, match=r"libibverbs.so.1.*apt-get install libibverbs1"):
        mooncake_client._load()
    monkeypatch.delitem(sys.modules, "mooncake")  # of this folder
