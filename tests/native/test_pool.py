from __future__ import annotations

import ctypes
from pathlib import Path

import numpy as np
import pytest
from support.native_library import compiled


@pytest.fixture(scope="module")
def pool(request: pytest.FixtureRequest) -> ctypes.CDLL:
    library = compiled(Path(__file__).parent / "pool_probe.cpp", "avx2", request.config.cache.mkdir("native"))
    library.others_take_over.restype = library.owners_of.restype = ctypes.c_bool
    return library


def ints(values: np.ndarray) -> ctypes.c_void_p:
    assert values.dtype == np.int32
    assert values.flags.c_contiguous
    return ctypes.c_void_p(values.ctypes.data)


@pytest.mark.parametrize("threads", [1, 2, 3, 8])
@pytest.mark.parametrize("spin_us", [0, 100])
def test_every_task_is_done_once(pool: ctypes.CDLL, threads: int, spin_us: int) -> None:
    sizes = np.random.default_rng(threads).integers(0, 40, 3000).astype(np.int32)
    sizes[::7] = 1
    counts = np.zeros(int(sizes.sum()), np.int32)
    pool.run_regions(threads, spin_us, len(sizes), ints(sizes), ints(counts))
    assert (counts == 1).all()


@pytest.mark.parametrize("held", [0, 7, 8, 15])
def test_a_thread_that_is_held_up_holds_up_one_task(pool: ctypes.CDLL, held: int) -> None:
    assert pool.others_take_over(2, 16, held)


@pytest.mark.parametrize("threads", [2, 3])
def test_a_thread_begins_with_its_own_part(pool: ctypes.CDLL, threads: int) -> None:
    """Rows stay in one core's cache from region to region."""
    owners = np.full(10 * threads, -1, np.int32)
    assert pool.owners_of(threads, len(owners), ints(owners))
    assert list(owners[::10]) == list(range(threads))
