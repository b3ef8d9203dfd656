"""DiskStore when several processes share its folder, and when they are killed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from support.disk_stores import PAGE, open_pages, segment_bytes

from kllm.cache.stores.segment import HEADER_BYTES

RECORD = HEADER_BYTES + PAGE

WRITER = """
import os, signal, sys
from pathlib import Path
sys.path.insert(0, {tests!r})
from support.disk_stores import Pages

name, fatal, folder, capacity, puts = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]), *map(int, sys.argv[4:])
calls = 0

def dying(real, halfway):
    def call(*arguments):
        global calls
        calls += 1
        if calls == fatal:
            if halfway:
                halfway(*arguments)
            os.kill(os.getpid(), signal.SIGKILL)
        return real(*arguments)
    return call

def half_written(fd, buffers, offset):
    os.write(os.open(f"/proc/self/fd/{{fd}}", os.O_WRONLY | os.O_APPEND), b"".join(buffers)[:5000])

if name == "half a write":
    os.pwritev = dying(os.pwritev, half_written)
elif name == "before a sync":
    os.fdatasync = dying(os.fdatasync, None)
elif name == "in a transaction":
    from kllm.cache.stores.index import Index
    Index._note_uses = dying(Index._note_uses, None)
elif name == "a new segment":
    os.fsync = dying(os.fsync, None)
elif name == "half an eviction":
    from kllm.cache.stores.index import Index
    Index._forget_row = dying(Index._forget_row, None)
elif name == "an evicted file":
    os.unlink = dying(os.unlink, None)

pages = Pages(folder, capacity, segment_bytes=40_000)
for first in range(0, 3 * puts, 3):
    pages.put(range(first, first + 3))
    print(first + 3, flush=True)
pages.close()
"""


def start_writer(
    folder: Path, name: str = "", fatal: int = 0, capacity: int = 8 << 20, puts: int = 1000
) -> subprocess.Popen[str]:
    code = WRITER.format(tests=str(Path(__file__).parents[2]))
    command = [sys.executable, "-c", code, name, *map(str, (fatal, folder, capacity, puts))]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[3])


def check_after_death(folder: Path, acknowledged: int) -> None:
    with open_pages(folder, 8 << 20, segment_bytes=40_000) as pages:
        assert pages.exists(range(acknowledged)) == acknowledged
        found = pages.got(range(acknowledged + 3))
        assert found[:acknowledged] == list(range(acknowledged))
        assert pages.store.counts.corrupt == 0
        assert segment_bytes(folder) == len(found) * RECORD  # nothing is left that nothing refers to
        assert pages.put(range(5000, 5020)) == 20
        assert pages.got(range(5000, 5020)) == list(range(5000, 5020))


@pytest.mark.parametrize(
    ("name", "fatal"),
    [
        ("half a write", 1),
        ("half a write", 4),
        ("before a sync", 6),
        ("in a transaction", 1),
        ("in a transaction", 8),
        ("a new segment", 6),
    ],
)
def test_a_writer_that_is_killed_loses_nothing_that_it_had_put(tmp_path, name, fatal):
    with start_writer(tmp_path, name, fatal) as writer:
        assert writer.stdout is not None
        lines = writer.stdout.read().split()
    assert writer.returncode == -9
    check_after_death(tmp_path, int(lines[-1]) if lines else 0)


@pytest.mark.parametrize("puts", [1, 7, 30])
def test_a_writer_is_killed_at_any_moment(tmp_path, puts):
    with start_writer(tmp_path) as writer:
        assert writer.stdout is not None
        for _ in range(puts):
            acknowledged = int(writer.stdout.readline())
        writer.kill()
        acknowledged = max([acknowledged, *map(int, writer.stdout.read().split())])
    with open_pages(tmp_path, 8 << 20, segment_bytes=40_000) as pages:
        assert pages.exists(range(acknowledged)) == acknowledged
        found = pages.got(range(acknowledged + 3))
        assert found[:acknowledged] == list(range(acknowledged))
        assert pages.store.counts.corrupt == 0


def test_two_processes_see_each_others_pages_and_the_dead_ones_room_is_used(tmp_path):
    capacity = 1 << 20
    with open_pages(tmp_path, capacity) as pages:
        pages.put(range(100_000, 100_010))
        with start_writer(tmp_path) as writer:
            assert writer.stdout is not None
            for _ in range(10):
                acknowledged = int(writer.stdout.readline())
            assert pages.got(range(acknowledged)) == list(range(acknowledged))
            pages.put(range(200_000, 200_010))
            writer.kill()
        pages.put(range(300_000, 300_300))  # more than the capacity: what the dead writer left is evicted too
        assert segment_bytes(tmp_path) <= capacity
        assert pages.exists([100_000]) == 0
        assert pages.got(range(300_150, 300_300)) == list(range(300_150, 300_300))


@pytest.mark.parametrize("name", ["half an eviction", "an evicted file"])
def test_a_writer_is_killed_while_it_evicts(tmp_path, name):
    capacity = 64 * RECORD
    with start_writer(tmp_path, name, fatal=3 if name == "half an eviction" else 20, capacity=capacity) as writer:
        assert writer.stdout is not None
        acknowledged = int(writer.stdout.read().split()[-1])
    assert writer.returncode == -9
    with open_pages(tmp_path, capacity) as pages:
        found = pages.got(range(acknowledged + 3))
        assert set(range(acknowledged - 48, acknowledged)) <= set(found)
        assert segment_bytes(tmp_path) == len(found) * RECORD
        pages.put(range(5000, 5064))
        assert segment_bytes(tmp_path) <= capacity
        assert pages.store.counts.corrupt == 0


def test_processes_that_write_and_evict_at_once_keep_the_bound(tmp_path):
    capacity = 96 * RECORD
    writers = [start_writer(tmp_path, capacity=capacity, puts=60) for _ in range(2)]
    with open_pages(tmp_path, capacity) as pages:
        for first in range(1000, 1180, 3):
            pages.put(range(first, first + 3))
            pages.got(range(180))
            # the files are not looked at all at once: one of each process may have come and gone meanwhile
            assert segment_bytes(tmp_path) <= capacity + 3 * 6 * RECORD
        for writer in writers:
            with writer:
                assert writer.stdout is not None
                assert writer.stdout.read().split()[-1] == "180"
            assert writer.returncode == 0
        assert segment_bytes(tmp_path) <= capacity
        # how many are left depends on the pages that both writers wrote at the same time
        assert len(pages.got([*range(180), *range(1000, 1180)])) > 20
        assert pages.store.counts.corrupt == 0
