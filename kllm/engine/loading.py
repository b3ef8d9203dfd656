"""From an EngineConfig to a running engine. Shared by the instance process and the offline LLM."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec

from kllm.cache.events import EventSink
from kllm.cache.kv_spec import KVSpec
from kllm.config import EngineConfig
from kllm.engine.assembly import make_scheduler
from kllm.engine.core import EngineCore
from kllm.engine.executor import Executor
from kllm.engine.grammar import GrammarCompiler
from kllm.engine.recording import RecordingExecutor
from kllm.hub.cache import quantized_folder
from kllm.hub.source import ModelSource
from kllm.resources import available_cores
from kllm.tokenization.tokenizer import Tokenizer

if TYPE_CHECKING:  # torch is imported when a model is loaded
    import torch

    from kllm.engine.runner import ModelRunner
    from kllm.kernels.operators import Operators
    from kllm.models.interface import KVCache, Model
    from kllm.models.weights.interface import Checkpoint

# On CPUs planning and computing share the cores. `kllm bench throughput --pipeline-depth 2` shows what 2 would do.
DEFAULT_DEPTH = 1

DTYPES = ("float32", "bfloat16", "float16")
"""What config.json may name as the type of a model, with or without `torch.` before it."""

Progress = Callable[[str, float], None]

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class Engine:
    """A core ready to run, and what it says about itself."""

    core: EngineCore
    compiler: GrammarCompiler
    tokenizer: Tokenizer
    max_model_len: int
    vocab_size: int
    num_blocks: int
    block_tokens: int
    operators: str
    kv_cache: KVCache
    kv_spec: KVSpec
    start_seconds: dict[str, float] = field(default_factory=dict)


class Phases:
    """Names and times what a start does."""

    def __init__(self, progress: Progress | None) -> None:
        self.seconds: dict[str, float] = {}
        self._progress = progress
        self._name = ""
        self._since = time.perf_counter()

    def begin(self, name: str) -> None:
        self.end()
        self._name = name
        self.report(name, 0.0)

    def end(self) -> None:
        now = time.perf_counter()
        if self._name:
            self.seconds[self._name] = round(now - self._since, 3)
        self._name, self._since = "", now

    def report(self, name: str, fraction: float) -> None:
        if self._progress is not None:
            self._progress(name, fraction)


def load_engine(
    config: EngineConfig,
    source: ModelSource,
    tokenizer: Tokenizer,
    progress: Progress | None = None,
    sink: EventSink | None = None,
) -> Engine:
    """Load weights, take the memory, wire scheduler, runner and executor. sink: hears what enters and leaves the KV
    cache. Raises WeightError or ValueError with a message for the operator."""
    phases = Phases(progress)
    phases.begin("import torch")
    import torch

    from kllm.engine import kv_cache
    from kllm.engine.lower_tiers import identify
    from kllm.engine.runner import ModelRunner
    from kllm.engine.sampler.sampler import Sampler
    from kllm.kernels.registry import get_operators, use_machine

    torch.set_num_threads(1)  # thousands of small tensors: a second thread costs more in barriers than it saves
    operators = get_operators(config.kernels, config.activations)
    _check_types(config, operators)
    checkpoint = _open_checkpoint(config, source, phases)
    phases.begin("load weights")
    dtype = _dtype(config, checkpoint, operators)
    # With the cpu operators, float16 goes through torch, as everything does with the others.
    native = operators.name == "cpu" and dtype != torch.float16
    cpus = _cpus_to_bind(config) if native else []  # torch's threads would all inherit the one core of their starter
    if operators.name == "cpu":
        use_machine(config.threads or available_cores(), config.instruction_set, cpus)
    model = _load_model(config, checkpoint, dtype, operators, phases)
    max_model_len = config.max_model_len or model.max_model_len
    if max_model_len > model.max_model_len:
        raise ValueError(f"max_model_len is {max_model_len}, but the model was made for {model.max_model_len} tokens")
    # The native operators have threads of their own; torch's would only compete with them.
    torch.set_num_threads(1 if native else config.threads or available_cores())
    phases.begin("allocate KV cache")
    spec = model.kv_spec(config.block_size)
    spec = msgspec.structs.replace(
        spec, model=identify(checkpoint.files, checkpoint.config, config, operators.numerics())
    )
    num_blocks = kv_cache.blocks_within(
        spec, config.kv_cache_memory, config.num_kv_blocks, config.max_num_seqs * max_model_len
    )
    cache = kv_cache.allocate(spec, num_blocks)
    runner = ModelRunner(
        model,
        cache,
        Sampler(model.vocab_size, config.max_num_seqs, tokenizer.eos_token_ids),
        block_tokens=config.block_size,
        max_rows=config.max_num_seqs,
        max_model_len=max_model_len,
    )
    executor = _make_executor(config, runner, cpus[0] if cpus else None)
    scheduler = make_scheduler(
        config,
        num_blocks=num_blocks,
        max_model_len=max_model_len,
        eos_token_ids=tokenizer.eos_token_ids,
        fingerprint=spec.fingerprint,
        sink=sink,
    )
    phases.end()
    return Engine(
        core=EngineCore(scheduler, executor, time.monotonic),
        compiler=GrammarCompiler(tokenizer.to_json(), model.vocab_size, tokenizer.eos_token_ids),
        tokenizer=tokenizer,
        max_model_len=max_model_len,
        vocab_size=model.vocab_size,
        num_blocks=num_blocks,
        block_tokens=config.block_size,
        operators=operators.describe(),
        kv_cache=cache,
        kv_spec=spec,
        start_seconds=phases.seconds,
    )


def _check_types(config: EngineConfig, operators: Operators) -> None:
    """Raises ValueError for types that do not go together, before minutes are spent on quantising."""
    quantises = config.quantization not in ("auto", "none")
    if operators.name == "cpu" and config.dtype == "float16" and quantises:
        raise ValueError(
            f"the cpu operators do not multiply {config.quantization} weights in float16: "
            "choose --dtype bfloat16 or float32"
        )


def _dtype(config: EngineConfig, checkpoint: Checkpoint, operators: Operators) -> torch.dtype:
    """Type of weights and activations."""
    import torch

    if config.dtype != "auto":
        return _named_dtype(config.dtype)
    dtype = _named_dtype(_checkpoint_dtype(checkpoint))
    if dtype == torch.float16 and operators.name == "cpu":
        _log.warning("the checkpoint is float16, which the cpu operators do not have: computing in bfloat16")
        return torch.bfloat16
    return dtype


def _checkpoint_dtype(checkpoint: Checkpoint) -> str:
    """float32 where the config does not say. Raises WeightError for a type that models are not computed in."""
    from kllm.models.weights import WeightError

    given = checkpoint.config.get("dtype")
    name = "float32" if given is None else str(given).removeprefix("torch.")
    if name not in DTYPES:
        choices = f"only {', '.join(DTYPES)}"
        raise WeightError(f"{checkpoint.config_file}: dtype {given!r} is not supported ({choices}); choose by --dtype")
    return name


def _named_dtype(name: str) -> torch.dtype:
    import torch

    dtype: torch.dtype = getattr(torch, name)
    return dtype


def _cpus_to_bind(config: EngineConfig) -> list[int]:
    """The cores that compute threads are bound to; empty: none are bound."""
    return sorted(os.sched_getaffinity(0)) if config.bind_threads and hasattr(os, "sched_getaffinity") else []


def _load_model(
    config: EngineConfig, checkpoint: Checkpoint, dtype: torch.dtype, operators: Operators, phases: Phases
) -> Model:
    import torch

    from kllm.models.loader import load_model

    return load_model(
        checkpoint,
        dtype,
        operators,
        phases.report,
        kv_dtype=None if config.kv_cache_dtype == "auto" else getattr(torch, config.kv_cache_dtype),
        keep_quantized=config.quantization != "none" and not (config.quantization == "auto" and config.dtype != "auto"),
        max_model_len=config.max_model_len,
    )


def _open_checkpoint(config: EngineConfig, source: ModelSource, phases: Phases) -> Checkpoint:
    """The weights as they come, or quantised as the config wants them."""
    from kllm.models.weights import QuantizedCheckpoint, open_checkpoint

    phases.begin("open checkpoint")
    checkpoint = open_checkpoint(source)
    if config.quantization in ("auto", "none"):
        return checkpoint
    phases.begin("quantise weights")
    return QuantizedCheckpoint(checkpoint, config.quantization, quantized_folder(), phases.report)


def _make_executor(config: EngineConfig, runner: ModelRunner, cpu: int | None) -> Executor:
    """cpu: the core to bind the computing thread to."""
    from kllm.engine.model_executor import ModelExecutor

    executor = ModelExecutor(runner, config.pipeline_depth or DEFAULT_DEPTH, cpu)
    return executor if config.record_steps is None else RecordingExecutor(executor, config.record_steps)
