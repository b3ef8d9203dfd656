"""A mixed load on far too little KV memory: every request ends as it would with plenty, and nothing leaks."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from support.engines import make_engine
from support.mixed_load import Job, LoadSize, Outcome, make_jobs, run
from support.tiny_models import write_tiny_llama

from kllm.engine.loading import Engine

TINY = LoadSize(vocab_size=271, short=16, long=64, output=100, over=1000)
BLOCK = 8


def close_clean(engine: Engine) -> None:
    """Nothing is left: no request, no row, no block outside the free list and the prefix tree."""
    kv = engine.core.scheduler.kv
    engine.core.scheduler.check()
    assert engine.core.num_unfinished == 0
    assert kv.available == kv.pool.num_blocks
    kv.clear()
    assert kv.pool.num_free == kv.pool.num_blocks
    engine.core.close()


def assert_right_ends(jobs: list[Job], outcomes: dict[str, Outcome], engine: Engine) -> None:
    for job in jobs:
        outcome = outcomes[job.request.request_id]
        params = job.request.params
        assert outcome.num_ends == 1
        if job.kind == "impossible":
            assert outcome.finish == "error"
            assert outcome.error
            assert not outcome.token_ids
        elif outcome.finish == "length":
            assert len(outcome.token_ids) == params.max_tokens
        elif outcome.finish == "stop":
            assert outcome.token_ids[-1] in engine.tokenizer.eos_token_ids
            assert_matches(job, engine.tokenizer.decode(outcome.token_ids))
        else:
            assert (outcome.finish, job.kind) == ("left", "aborted")


def assert_matches(job: Job, text: str) -> None:
    """A structured output that ended by itself is what its grammar says."""
    wanted = job.request.params.structured_outputs
    if wanted is None:
        return
    if wanted.regex is not None:
        assert re.fullmatch(wanted.regex, text)
    elif wanted.choice is not None:
        assert text in wanted.choice
    elif wanted.json is not None:
        assert isinstance(json.loads(text)["n"], int)
    else:
        assert isinstance(json.loads(text), dict)


OPTIONS: dict[str, Any] = {
    "dtype": "float32",
    "kernels": "invariant",
    "block_size": BLOCK,
    "max_num_seqs": 32,
    "max_num_batched_tokens": 96,
}


def admissible(jobs: list[Job]) -> list[Job]:
    return [job for job in jobs if job.kind != "impossible"]


def blocks_needed(jobs: list[Job], block: int) -> tuple[int, int]:
    """Blocks that 32 running requests of mean length need, and blocks of the longest one."""
    lengths = [len(job.request.prompt_token_ids) + (job.request.params.max_tokens or 0) for job in admissible(jobs)]
    return 32 * -(-sum(lengths) // len(lengths) // block), -(-max(lengths) // block)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As small as a model can be: the scheduling is what is tested."""
    size = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "max_position_embeddings": 2048}
    return write_tiny_llama(tmp_path_factory.mktemp("models") / "smallest-llama", **size)


@pytest.fixture(scope="module")
def jobs() -> list[Job]:
    return make_jobs(2000, TINY, seed=7, per_step=0.6)


@pytest.fixture(scope="module")
def expected(model: Path, jobs: list[Job]) -> dict[str, Outcome]:
    """What every request yields when there is room for all."""
    engine = make_engine(model, num_kv_blocks=4 * blocks_needed(jobs, BLOCK)[0], **OPTIONS)
    outcomes = run(engine.core, engine.compiler, admissible(jobs), check=False)
    assert engine.core.load().preemptions == 0
    engine.core.close()
    return outcomes


@pytest.mark.parametrize("depth", [1, 2])
def test_small_pool_changes_nothing(model: Path, jobs: list[Job], expected: dict[str, Outcome], depth: int) -> None:
    """2,000 requests on a quarter of the blocks that the running set needs: the same tokens as with plenty."""
    needed, largest = blocks_needed(jobs, BLOCK)
    engine = make_engine(model, num_kv_blocks=max(needed // 4, largest), pipeline_depth=depth, **OPTIONS)
    outcomes = run(engine.core, engine.compiler, jobs)
    assert engine.core.load().preemptions >= 500
    assert_right_ends(jobs, outcomes, engine)
    for job in admissible(jobs):
        got, wanted = outcomes[job.request.request_id], expected[job.request.request_id]
        assert (got.token_ids, got.finish) == (wanted.token_ids, wanted.finish)
    close_clean(engine)


@pytest.mark.slow
def test_smollm2_on_a_small_pool() -> None:
    """200 requests on the real model, an eighth of the blocks that the running set needs."""
    size = LoadSize(vocab_size=49152, short=60, long=300, output=60, over=9000)
    jobs = make_jobs(200, size, seed=3, per_step=3.0)
    needed, largest = blocks_needed(jobs, 16)
    engine = make_engine(
        "smollm2", num_kv_blocks=max(needed // 8, largest), max_num_seqs=32, max_num_batched_tokens=256, threads=None
    )
    outcomes = run(engine.core, engine.compiler, jobs)
    assert engine.core.load().preemptions > 5
    assert_right_ends(jobs, outcomes, engine)
    close_clean(engine)
