"""llama.cpp through llama-cpp-python's low-level interface. options: "flash_attention": 1 on, 0 off, -1 automatic.

Sequences run side by side in one batch, as llama.cpp's own server does it; a common prefix is computed once and its
cells are shared (this needs the unified cache).
"""

from __future__ import annotations

from typing import Any

from visit import Job, visit

MOST_TOKENS = 2048  # in one call of llama_decode

Item = tuple[int, int, int, bool]  # token, position, sequence, whether its logits are wanted


class LlamaCpp:
    distribution = "llama-cpp-python"

    def __init__(self, job: Job) -> None:
        import llama_cpp

        self._api: Any = llama_cpp
        self._job = job
        self._api.llama_backend_init()
        params = self._api.llama_model_default_params()
        params.n_gpu_layers = 0
        self._model = self._api.llama_model_load_from_file(job.model.encode(), params)
        if not self._model:
            raise SystemExit(f"llama.cpp cannot load {job.model}")
        self._vocab_size: int = self._api.llama_vocab_n_tokens(self._api.llama_model_get_vocab(self._model))
        self._batch = self._api.llama_batch_init(MOST_TOKENS, 0, 1)
        self._context: Any = None
        self._layout: tuple[bool, bool] | None = None

    def prepare(self, sequences: int, shared: int) -> None:
        """A context for one stream or for many; an empty cache."""
        layout = (sequences > 1, shared > 0)
        if layout != self._layout:
            if self._context is not None:
                self._api.llama_free(self._context)
            self._context, self._layout = self._new_context(*layout), layout
        self._api.llama_memory_clear(self._api.llama_get_memory(self._context), True)

    def _new_context(self, many: bool, unified: bool) -> Any:
        sizes = self._job.sizes
        params = self._api.llama_context_default_params()
        params.n_ctx = sizes["batch"] * sizes["batch_tokens"] if many else sizes["tokens"]
        params.n_seq_max = sizes["batch"] if many else 1
        params.n_batch = MOST_TOKENS
        params.n_threads = params.n_threads_batch = self._job.cores
        params.flash_attn_type = self._job.options["flash_attention"]
        params.kv_unified = unified
        params.no_perf = True
        context = self._api.llama_init_from_model(self._model, params)
        if not context:
            raise SystemExit("llama.cpp cannot make a context")
        return context

    def generate(self, prompts: list[list[int]], tokens: int, shared: int = 0) -> list[list[int]]:
        if shared:
            self._share_prefix(prompts[0][:shared], len(prompts))
        answers = [[token] for token in self._prefill(prompts, shared)]
        for step in range(tokens - 1):
            items = [(a[-1], len(p) + step, i, True) for i, (a, p) in enumerate(zip(answers, prompts, strict=True))]
            self._decode(items)
            for index, answer in enumerate(answers):
                answer.append(self._best(index))
        return answers

    def _share_prefix(self, prefix: list[int], sequences: int) -> None:
        self._decode([(token, position, 0, False) for position, token in enumerate(prefix)])
        memory = self._api.llama_get_memory(self._context)
        for sequence in range(1, sequences):
            self._api.llama_memory_seq_cp(memory, 0, sequence, 0, len(prefix))

    def _prefill(self, prompts: list[list[int]], start: int) -> list[int]:
        """Each prompt's next token. Prompts follow each other in batches as large as allowed."""
        items: list[Item] = []
        for sequence, prompt in enumerate(prompts):
            last = len(prompt) - 1
            items += [(prompt[i], i, sequence, i == last) for i in range(start, len(prompt))]
        best: list[int] = []
        for position in range(0, len(items), MOST_TOKENS):
            part = items[position : position + MOST_TOKENS]
            self._decode(part)
            best += [self._best(i) for i, item in enumerate(part) if item[3]]
        return best

    def _decode(self, items: list[Item]) -> None:
        batch = self._batch
        batch.n_tokens = len(items)
        for i, (token, position, sequence, wanted) in enumerate(items):
            batch.token[i], batch.pos[i], batch.logits[i] = token, position, wanted
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, sequence
        if status := self._api.llama_decode(self._context, batch):
            raise SystemExit(f"llama_decode returned {status}")

    def _best(self, index: int) -> int:
        import numpy as np

        logits = self._api.llama_get_logits_ith(self._context, index)
        return int(np.ctypeslib.as_array(logits, shape=(self._vocab_size,)).argmax())


if __name__ == "__main__":
    visit(LlamaCpp)
