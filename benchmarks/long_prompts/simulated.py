"""Loads on one simulated instance: the production scheduler, cache and gateway, step times from a cost model."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.long_prompts.mixed import Seen
from kllm.config import EngineConfig
from kllm.costs.hardware import THIS_MACHINE
from kllm.costs.layout import Layout
from kllm.costs.model_specs import find_model
from kllm.costs.noise import NoisyStepTime
from kllm.costs.roofline import RooflineModel
from kllm.costs.step import StepTimeModel
from kllm.simulation.executor import PlanningCost
from kllm.simulation.fleet import FleetSpec, run_fleet
from kllm.simulation.launcher import InstanceSpec
from kllm.simulation.results import FleetResult
from kllm.simulation.saturation import InstanceLimits, MeanRequest, saturation_rate
from kllm.workload.sample import Sample, TokenSource

PLANNING = PlanningCost(150e-6, 12e-6)
NOISE = 0.05
KV_TOKENS = 200_000
MODEL = find_model("smollm2")


def this_machine() -> RooflineModel:
    """Step times of SmolLM2 on the machine of docs/performance.md."""
    return RooflineModel(THIS_MACHINE, MODEL, Layout(tp=1))


def simulate(
    samples: Sequence[Sample], config: EngineConfig, times: StepTimeModel, seed: int = 0, kv_tokens: int = KV_TOKENS
) -> FleetResult:
    spec = FleetSpec(
        instances=1,
        instance=InstanceSpec(
            engine=config,
            num_blocks=kv_tokens // config.block_size,
            max_model_len=MODEL.max_length,
            vocab_size=MODEL.vocab_size,
            start_phases=(("start", 1.0),),
            planning=PLANNING,
        ),
        times=lambda rng: NoisyStepTime(times, rng, NOISE),
        seed=seed,
    )
    return run_fleet(spec, samples, TokenSource(seed, MODEL.vocab_size))


def seen(result: FleetResult) -> Seen:
    outcomes = result.outcomes
    return Seen(
        ttft=[(outcome.prompt_tokens, outcome.ttft_s) for outcome in outcomes if outcome.ttft_s is not None],
        tokens=sum(outcome.prompt_tokens + outcome.output_tokens for outcome in outcomes),
        duration_s=max(outcome.end_s for outcome in outcomes) - min(outcome.arrival_s for outcome in outcomes),
    )


def saturation(samples: Sequence[Sample], config: EngineConfig, times: StepTimeModel) -> float:
    """Requests a second, like these on average, that saturate the instance."""
    count = len(samples)
    request = MeanRequest(
        sum(sample.input_len for sample in samples) / count, 0.0, sum(sample.output_len for sample in samples) / count
    )
    limits = InstanceLimits(KV_TOKENS, config.max_num_batched_tokens, config.max_num_seqs)
    return saturation_rate(request, limits, times)
