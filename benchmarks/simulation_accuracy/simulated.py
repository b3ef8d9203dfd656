"""The same load on a simulated instance: the production scheduler, cache and gateway, calibrated step times."""

from __future__ import annotations

from benchmarks.simulation_accuracy.calibration import Calibration, StepAndPlanning
from benchmarks.simulation_accuracy.loads import Load
from benchmarks.simulation_accuracy.real import Latencies, Run, prompt_seed
from kllm.config import EngineConfig
from kllm.costs.noise import NoisyStepTime
from kllm.simulation.fabric import Weather
from kllm.simulation.fleet import FleetSpec, run_fleet
from kllm.simulation.launcher import InstanceSpec
from kllm.simulation.results import FleetResult
from kllm.simulation.saturation import InstanceLimits, MeanRequest, saturation_rate
from kllm.workload.sample import TokenSource


def simulate(run: Run, config: EngineConfig, calibration: Calibration, seed: int) -> Latencies:
    """The samples of a real run, on an instance like its server's. seed: of the noise.

    The path between client and instance is the latency of the link, half of it each way: a request that follows another
    waits for it too."""
    spec = FleetSpec(
        instances=1,
        instance=InstanceSpec(
            engine=config,
            num_blocks=run.num_blocks,
            max_model_len=run.max_model_len,
            vocab_size=run.vocab_size,
            start_phases=(("start", 1.0),),
            planning=calibration.planning,
        ),
        times=lambda rng: NoisyStepTime(calibration.times, rng, calibration.sigma),
        seed=seed,
        weather=Weather(latency_s=calibration.path_s / 2, jitter_s=0.0),
    )
    samples = run.load.samples(run.rate, run.repeat)
    return latencies(run_fleet(spec, samples, TokenSource(prompt_seed(run.load, run.repeat), run.vocab_size)))


def latencies(result: FleetResult) -> Latencies:
    return Latencies(
        ttft_s=[outcome.ttft_s for outcome in result.outcomes if outcome.ttft_s is not None],
        tpot_s=[outcome.tpot_s for outcome in result.outcomes if outcome.tpot_s is not None],
        tokens=sum(outcome.output_tokens for outcome in result.outcomes),
        duration_s=max(o.end_s for o in result.outcomes) - min(o.arrival_s for o in result.outcomes),
    )


def saturation(load: Load, config: EngineConfig, calibration: Calibration, kv_tokens: int) -> float:
    """Requests a second of this load that saturate the instance."""
    request = MeanRequest(input=sum(load.inputs) / 2, cached=0.0, output=sum(load.outputs) / 2)
    limits = InstanceLimits(kv_tokens, config.max_num_batched_tokens, config.max_num_seqs)
    return saturation_rate(request, limits, StepAndPlanning(calibration))
