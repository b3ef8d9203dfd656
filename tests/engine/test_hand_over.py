"""EngineCore and requests that go on elsewhere after their prefill: nothing of them stays behind."""

from __future__ import annotations

from pathlib import Path

from support.engines import make_engine

from kllm.messages import Submit
from kllm.request import Request, SamplingParams, StructuredOutputs

DIGITS = StructuredOutputs(regex="[0-9]{20,30}")


def test_grammars_of_requests_that_went_elsewhere_are_forgotten(tiny_llama_folder: Path) -> None:
    engine = make_engine(tiny_llama_folder, dtype="float32", kernels="reference", num_kv_blocks=64)
    core, compiler = engine.core, engine.compiler
    assert compiler is not None
    try:
        for number in range(5):
            params = SamplingParams(seed=number, max_tokens=40, structured_outputs=DIGITS)
            request = Request(request_id=f"r{number}", prompt_token_ids=[5, 6, 7], params=params)
            core.add(Submit(request=request, prefill_only=True))
            core.set_grammar(request.request_id, compiler.compile(DIGITS))
        while core.num_unfinished:
            core.step()
        assert len(core.take_prefilled()) == 5
        assert not core._matchers
        assert core.scheduler.kv.clear()
    finally:
        core.close()
