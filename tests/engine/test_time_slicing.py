"""Time-sliced separation on a real model: the tokens are those of shared steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.engines import make_engine
from support.mixed_load import LoadSize, Outcome, make_jobs, run
from support.tiny_models import write_tiny_llama

SIZE = LoadSize(vocab_size=271, short=16, long=150, output=30, over=1000)


@pytest.mark.parametrize("depth", [1, 2])
def test_slices_change_no_token(tmp_path: Path, depth: int) -> None:
    """Short, long, shared-prefix, structured, sibling and aborted requests, on a pool so small that some lose their
    places. A target that is always missed and one that never is."""
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "max_position_embeddings": 2048}
    model = write_tiny_llama(tmp_path / "model", **shape)
    jobs = make_jobs(40, SIZE, seed=5, per_step=0.6)
    options: dict[str, Any] = {"dtype": "float32", "kernels": "invariant", "block_size": 8, "max_num_seqs": 16}
    options |= {"max_num_batched_tokens": 64, "num_kv_blocks": 80, "pipeline_depth": depth}

    def outcomes(**knobs: Any) -> dict[str, Outcome]:
        engine = make_engine(model, **options, **knobs)
        found = run(engine.core, engine.compiler, jobs)
        slicing = engine.core.scheduler._slicing
        assert (slicing is not None and slicing.num_slices > 5) == bool(knobs)
        engine.core.close()
        return found

    expected = outcomes()
    for target in (0.001, 1000.0):
        got = outcomes(tpot_target_ms=target, prefill_every=8)
        for job in jobs:
            name = job.request.request_id
            if job.kind != "aborted":
                assert (got[name].token_ids, got[name].finish) == (expected[name].token_ids, expected[name].finish)
