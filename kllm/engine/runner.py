"""ModelRunner: carries out plans on a model. Keeps a permanent row per request, so a step touches only what changed.

tokens     [rows, max_model_len + 1]   all known tokens of a row; a sampled one is appended here at once, which is
                                       what lets the next plan be made before this one commits
tables     [rows, max_blocks]          block table
position   [rows]                      tokens whose KV is computed
length     [rows]                      tokens known
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from kllm.engine.sampler.sampler import NonFiniteLogits, Sampler, prompt_logprobs
from kllm.kernels.batch import ForwardBatch, Span
from kllm.models.interface import KVCache, Model
from kllm.request import TokenLogprobs
from kllm.scheduling.plan import Late, NewRow, Plan, RowResult, RowStep, StepResult

LOGITS_SLICE = 64  # rows of prompt logits held at once


@dataclass(slots=True)
class _PromptLogprobs:
    num_top: int
    num_prompt: int


class ModelRunner:
    """max_rows: rows a plan may name. Not thread-safe: one executor thread drives it."""

    def __init__(
        self, model: Model, cache: KVCache, sampler: Sampler, *, block_tokens: int, max_rows: int, max_model_len: int
    ) -> None:
        self.model = model
        self.cache = cache
        self.sampler = sampler
        self.block_tokens = block_tokens
        max_blocks = -(-max_model_len // block_tokens)
        self._tokens = np.zeros((max_rows, max_model_len + 1), np.int64)
        self._tables = np.zeros((max_rows, max_blocks), np.int64)
        self._num_blocks = np.zeros(max_rows, np.int64)
        self._position = np.zeros(max_rows, np.int64)
        self._length = np.zeros(max_rows, np.int64)
        self._prompt_logprobs: dict[int, _PromptLogprobs] = {}

    @torch.inference_mode()
    def execute(self, plan: Plan, late: Callable[[], Late]) -> StepResult:
        """Run one plan. `late` is called after the forward pass, if the plan needs it, and may wait."""
        started = time.perf_counter()
        self._apply(plan)
        rows = np.array([step.row for step in plan.steps], np.int64)
        counts = np.array([step.count for step in plan.steps], np.int64)
        starts = self._position[rows]
        tokens, batch = self._batch(rows, counts, starts)
        ends = np.cumsum(counts)
        wanted = self._wanted(plan, counts, ends)
        batch.wanted = torch.from_numpy(np.flatnonzero(wanted))
        hidden = self.model.forward(tokens, batch, self.cache)
        self._position[rows] += counts
        results = {step.row: RowResult() for step in plan.steps}
        ends = np.cumsum(wanted)[ends - 1]  # from here on counted in hidden
        if self._prompt_logprobs:
            for step, start, end in zip(plan.steps, starts, ends, strict=True):
                if step.row not in self._prompt_logprobs:
                    continue
                try:
                    results[step.row].prompt_logprobs = self._score_prompt(step, int(start), hidden[: int(end)])
                except NonFiniteLogits as error:
                    results[step.row].error = str(error)
        self._sample(plan, hidden, ends, late, results)
        return StepResult(plan.id, results, time.perf_counter() - started)

    # -- state -----------------------------------------------------------------------------------------------

    def _apply(self, plan: Plan) -> None:
        for row in plan.ended:
            self.sampler.remove(row)
            self._prompt_logprobs.pop(row, None)
        for new in plan.new:
            self._add(new)
        for row, index, block in plan.remaps:
            self._tables[row, index] = block
        for step in plan.steps:
            if step.blocks:
                self._append_blocks(step.row, step.blocks)
            if step.skip:
                self._position[step.row] += step.skip

    def _add(self, new: NewRow) -> None:
        row = new.row
        self._tokens[row, : len(new.tokens)] = new.tokens
        self._length[row] = len(new.tokens)
        self._position[row] = new.start
        self._num_blocks[row] = 0
        self._append_blocks(row, new.blocks)
        self.sampler.add(new)
        num_top = new.params.prompt_logprobs
        if num_top is not None and len(new.tokens) == new.num_prompt:
            self._prompt_logprobs[row] = _PromptLogprobs(num_top, new.num_prompt)

    def _append_blocks(self, row: int, blocks: list[int]) -> None:
        count = int(self._num_blocks[row])
        self._tables[row, count : count + len(blocks)] = blocks
        self._num_blocks[row] = count + len(blocks)

    # -- the step --------------------------------------------------------------------------------------------

    def _batch(self, rows: np.ndarray, counts: np.ndarray, starts: np.ndarray) -> tuple[torch.Tensor, ForwardBatch]:
        first = np.cumsum(counts) - counts
        row_of_token = np.repeat(rows, counts)
        positions = np.arange(len(row_of_token)) + np.repeat(starts - first, counts)
        blocks = self._tables[row_of_token, positions // self.block_tokens]
        slots = blocks * self.block_tokens + positions % self.block_tokens
        contexts = starts + counts
        width = -(-int(contexts.max()) // self.block_tokens)
        spans = [Span(*map(int, span)) for span in zip(first, counts, contexts, strict=True)]
        batch = ForwardBatch(
            positions=torch.from_numpy(positions),
            slots=torch.from_numpy(slots),
            tables=torch.from_numpy(self._tables[rows, :width]),
            spans=spans,
            block_tokens=self.block_tokens,
        )
        return torch.from_numpy(self._tokens[row_of_token, positions]), batch

    def _wanted(self, plan: Plan, counts: np.ndarray, ends: np.ndarray) -> np.ndarray:
        """bool [T]: tokens whose hidden state is read, to sample from or to score the prompt."""
        wanted = np.zeros(int(ends[-1]), bool)
        for step, count, end in zip(plan.steps, counts, ends, strict=True):
            if step.row in self._prompt_logprobs:
                wanted[end - count : end] = True
            elif step.sample:
                wanted[end - 1] = True
        return wanted

    def _score_prompt(self, step: RowStep, start: int, hidden: torch.Tensor) -> list[TokenLogprobs]:
        """Log-probabilities of the prompt tokens that follow the tokens just computed. hidden ends with this row's."""
        wanted = self._prompt_logprobs[step.row]
        last = min(start + step.count, wanted.num_prompt - 1)
        mine = hidden[len(hidden) - step.count :]
        following = self._tokens[step.row, start + 1 : last + 1]
        scored: list[TokenLogprobs] = []
        for i in range(0, len(following), LOGITS_SLICE):
            next_tokens = following[i : i + LOGITS_SLICE].tolist()
            logits = self.model.logits(mine[i : i + len(next_tokens)])
            scored += prompt_logprobs(logits, next_tokens, wanted.num_top)
        return scored

    def _sample(
        self,
        plan: Plan,
        hidden: torch.Tensor,
        ends: np.ndarray,
        late: Callable[[], Late],
        results: dict[int, RowResult],
    ) -> None:
        chosen = [i for i, step in enumerate(plan.steps) if step.sample]
        masks = late().masks if plan.needs_bind else {}
        if not chosen:
            return
        rows = [plan.steps[i].row for i in chosen]
        last = hidden if len(chosen) == len(hidden) else hidden[torch.from_numpy(ends[chosen] - 1)]
        logits = self.model.logits(last)
        positions = self._length[rows].tolist()
        for row, position, sampled in zip(
            rows, positions, self.sampler.sample(logits, rows, positions, masks), strict=True
        ):
            self._tokens[row, position] = sampled.token
            self._length[row] = position + 1
            results[row].token = sampled.token
            results[row].logprobs = sampled.logprobs
            if results[row].error is None:
                results[row].error, results[row].invalid = sampled.error, sampled.invalid
