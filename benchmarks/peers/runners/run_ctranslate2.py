"""CTranslate2's Generator: one static batch. It takes tokens as text, which the converted model lists."""

from __future__ import annotations

import json
from pathlib import Path

from visit import Job, visit


class CTranslate2:
    distribution = "ctranslate2"

    def __init__(self, job: Job) -> None:
        import ctranslate2

        vocabulary = Path(job.model) / "vocabulary.json"
        self._tokens: list[str] = json.loads(vocabulary.read_text(encoding="utf-8"))
        self._generator = ctranslate2.Generator(
            job.model, device="cpu", compute_type="int8", inter_threads=1, intra_threads=job.cores
        )

    def prepare(self, sequences: int, shared: int) -> None:
        pass

    def generate(self, prompts: list[list[int]], tokens: int, shared: int = 0) -> list[list[int]]:
        results = self._generator.generate_batch(
            [[self._tokens[token] for token in ids] for ids in prompts],
            max_length=tokens,
            min_length=tokens,
            sampling_topk=1,
            include_prompt_in_result=False,
        )
        return [list(result.sequences_ids[0]) for result in results]


if __name__ == "__main__":
    visit(CTranslate2)
