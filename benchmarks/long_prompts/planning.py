"""What planning a step costs with 256 requests running and 1,000 waiting: Scheduler.plan alone, nothing else."""

from __future__ import annotations

import random
import statistics
import time
from typing import Any

from rich.progress import Progress

from kllm.config import EngineConfig
from kllm.engine.assembly import make_scheduler
from kllm.messages import Submit
from kllm.request import Request, SamplingParams
from kllm.scheduling.plan import RowResult, StepResult

RUNNING, WAITING = 256, 1000
SHORT, LONG, LONG_SHARE = (64, 512), (4096, 8192), 0.03
BUDGET = 2048
BLOCK = 64
STEPS = BLOCK - 4  # the blocks that running requests have last that long
ROUNDS = 3
MOST_MS, AIM_MS = 1.5, 0.8
POLICIES = ("fcfs", "fair")

# Why requests wait, by name: no place is free; there is room for all, and a step takes what its budget allows; there
# are places, and nothing fits into the KV cache.
SITUATIONS = {"no place": (RUNNING, 100_000), "budget": (2 * RUNNING, 100_000), "no room": (2 * RUNNING, 3 * RUNNING)}


class Crowd:
    """A scheduler kept at RUNNING decoding requests and WAITING others: what gets its first token is replaced."""

    def __init__(self, policy: str, situation: str, seed: int) -> None:
        places, blocks = SITUATIONS[situation]
        knobs = {"block_size": BLOCK, "scheduling_policy": policy, "max_num_batched_tokens": BUDGET}
        config = EngineConfig.model_validate({"model": "none", "max_num_seqs": places} | knobs)
        self.scheduler = make_scheduler(config, num_blocks=blocks, max_model_len=131_072, eos_token_ids=())
        self._rng = random.Random(seed)
        self._added = 0
        self._decoding = {self._add(BLOCK + 1) for _ in range(RUNNING)}
        started: set[str] = set()
        while started < self._decoding:
            started |= set(self.step()[1])
        for _ in range(WAITING):
            self._add_waiting()

    def step(self) -> tuple[float, list[str]]:
        """(seconds that planning took, requests that got a token)."""
        began = time.perf_counter()
        plan = self.scheduler.plan(0.0)
        seconds = time.perf_counter() - began
        assert plan is not None
        results = {step.row: RowResult(7) for step in plan.steps if step.sample}
        deltas = self.scheduler.commit(StepResult(plan.id, results), 0.0)
        return seconds, [delta.request_id for delta in deltas if delta.token_ids]

    def measured_step(self) -> float:
        """Seconds that planning took; afterwards the crowd is as large as before."""
        seconds, served = self.step()
        for request_id in served:
            if request_id not in self._decoding:
                self.scheduler.abort([request_id])
                self._add_waiting()
        return seconds

    def _add_waiting(self) -> None:
        self._add(self._rng.randint(*(LONG if self._rng.random() < LONG_SHARE else SHORT)))

    def _add(self, length: int) -> str:
        self._added += 1
        params = SamplingParams(max_tokens=1000, ignore_eos=True, seed=1)
        request = Request(request_id=f"{self._added}", prompt_token_ids=[self._added] * length, params=params)
        self.scheduler.add(Submit(request=request), 0.0)
        return request.request_id


def measure(progress: Progress) -> dict[str, Any]:
    """plan_ms: the mean of the slowest policy and situation; and the figures of each."""
    task = progress.add_task("planning", total=len(POLICIES) * len(SITUATIONS))
    figures: dict[str, Any] = {}
    for policy in POLICIES:
        for situation in SITUATIONS:
            times = []
            for seed in range(ROUNDS):
                crowd = Crowd(policy, situation, seed)
                times += [crowd.measured_step() * 1e3 for _ in range(STEPS)]
            figures[f"{policy}, {situation}"] = {
                "mean_ms": round(statistics.fmean(times), 3),
                "median_ms": round(statistics.median(times), 3),
                "longest_ms": round(max(times), 3),
            }
            progress.advance(task)
    return {
        "plan_ms": max(figure["mean_ms"] for figure in figures.values()),
        "running": RUNNING,
        "waiting": WAITING,
        "situations": figures,
    }
