"""transformers: one static batch, scaled dot product attention."""

from __future__ import annotations

from visit import Job, visit


class Transformers:
    distribution = "transformers"

    def __init__(self, job: Job) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        torch.set_num_threads(job.cores)
        model = AutoModelForCausalLM.from_pretrained(job.model, dtype=torch.bfloat16, attn_implementation="sdpa")
        self._model = model.eval()

    def prepare(self, sequences: int, shared: int) -> None:
        pass

    def generate(self, prompts: list[list[int]], tokens: int, shared: int = 0) -> list[list[int]]:
        import torch

        ids = torch.tensor(prompts)
        lengths = {"max_new_tokens": tokens, "min_new_tokens": tokens, "do_sample": False}
        with torch.inference_mode():
            output = self._model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), **lengths)
        return output[:, ids.shape[1] :].tolist()


if __name__ == "__main__":
    visit(Transformers)
