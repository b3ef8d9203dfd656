"""What is served: chats with long prompts among them, on a large GPU model and on the small one on a processor."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.time_slices.engine import Machine
from kllm.costs.fitted import load_step_time
from kllm.costs.hardware import find_hardware
from kllm.costs.layout import Layout
from kllm.costs.model_specs import find_model
from kllm.costs.roofline import RooflineModel
from kllm.workload.arrivals import poisson_arrivals
from kllm.workload.generators import long_short_samples, with_arrivals
from kllm.workload.replay import trace_samples
from kllm.workload.sample import OWN, Sample
from kllm.workload.traces import read_trace

STEP_TIMES = Path(__file__).parents[1] / "results" / "step_times_smollm2.json"
GLM_TP8_KV_TOKENS = 634_000  # `kllm capacity`: GLM-5.2 on 8 H200, tp8
REQUESTS = 400
FIRST_KEY = 10_000_000  # of long prompts' tokens: no request of the trace has it


@dataclass(frozen=True)
class Scenario:
    """rates: requests a second; the last is more than can be served. targets_ms: of time-sliced separation, the
    loosest last. step_tokens: of its steps. samples: requests of a rate and seed."""

    machine: Machine
    rates: tuple[float, ...]
    targets_ms: tuple[float, ...]
    step_tokens: int
    block_size: int
    max_num_seqs: int
    samples: Callable[[float, int], list[Sample]]


def gpu() -> Scenario:
    """GLM-5.2 on 8 H200: chats of the Azure trace, one prompt in twenty 8,000 to 32,000 tokens long."""
    model = find_model("glm-5.2")
    machine = Machine(
        "GLM-5.2 on 8 H200",
        RooflineModel(find_hardware("h200"), model, Layout(tp=8)),
        GLM_TP8_KV_TOKENS,
        200_000,
        model.top_k,
    )

    def samples(rate: float, seed: int) -> list[Sample]:
        chats = trace_samples(read_trace("azure-conv", limit_requests=REQUESTS))
        return _arriving(_with_long(chats, 0.05, (8_000, 32_000), seed), rate, seed)

    return Scenario(machine, (4.0, 8.0, 24.0), (35.0, 50.0, 70.0, 100.0), 8192, 64, 256, samples)


def processor() -> Scenario:
    """SmolLM2 on two cores: prompts of 32 to 256 tokens, one in thirty 1,000 to 3,000 long."""
    machine = Machine("SmolLM2 on two cores", load_step_time(STEP_TIMES), 100_000, 8192)

    def samples(rate: float, seed: int) -> list[Sample]:
        made = long_short_samples(REQUESTS, 1 / 30, (32, 256), (1000, 3000), (32, 256), seed)
        return _arriving(made, rate, seed)

    return Scenario(machine, (1.0, 2.0, 6.0), (25.0, 50.0, 100.0, 250.0), 512, 16, 64, samples)


def _with_long(chats: list[Sample], share: float, lengths: tuple[int, int], seed: int) -> Iterator[Sample]:
    rng = random.Random(f"long/{seed}")
    for index, chat in enumerate(chats):
        if rng.random() < share:
            yield replace(chat, parts=(((OWN, FIRST_KEY + index), rng.randint(*lengths)),))
        else:
            yield chat


def _arriving(samples: Iterator[Sample] | list[Sample], rate: float, seed: int) -> list[Sample]:
    return with_arrivals(list(samples), poisson_arrivals(rate, seed))
