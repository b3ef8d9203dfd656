"""kLLM's offline API. options: fields of its engine configuration."""

from __future__ import annotations

from visit import Job, visit


class Kllm:
    distribution = "kllm"

    def __init__(self, job: Job) -> None:
        from kllm import LLM
        from kllm.config import EngineConfig

        batch = job.sizes["batch"]
        block = EngineConfig.model_fields["block_size"].default
        at_once = max(batch * job.sizes["batch_tokens"], job.sizes["tokens"])
        self._llm = LLM(
            job.model,
            threads=job.cores,
            max_num_seqs=batch,
            num_kv_blocks=-(-at_once // block) + batch,
            **job.options,
        )

    def prepare(self, sequences: int, shared: int) -> None:
        pass

    def generate(self, prompts: list[list[int]], tokens: int, shared: int = 0) -> list[list[int]]:
        from kllm import SamplingParams

        params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
        return [list(output.outputs[0].token_ids) for output in self._llm.generate(prompts, params, progress=False)]


if __name__ == "__main__":
    visit(Kllm)
