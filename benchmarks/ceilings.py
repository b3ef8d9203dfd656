"""What this machine can do at most, and what that means for a model: the two floors of every step.

    python benchmarks/ceilings.py [MODEL] [--from FILE] [--json]

Measured: read bandwidth over buffers from 1 GiB down to 1 MiB, and the rate of dot products with operands in registers,
on one thread and on all. Computed from the model's config: the bytes that a step must move and the operations that it
must do. A step takes at least bytes / bandwidth, and at least operations / rate; the larger of the two binds.

--from takes the ceilings of another machine from a file in the form that --json prints, and measures nothing.
Neighbours on a busy machine make bandwidth look lower than it is: `chrt -f 1 python benchmarks/ceilings.py` keeps them
off for the ten seconds that it takes. What other guests of the same host do stays in the figures.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import sys
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import track
from rich.table import Table

MIB = 1 << 20
SIZES = (1024 * MIB, 256 * MIB, 128 * MIB, 64 * MIB, 24 * MIB, MIB)
KINDS = ("fp32", "bf16", "int8")
FLOAT_BYTES = 4


@dataclass(frozen=True, slots=True)
class ModelSize:
    """A decoder with grouped-query attention and a gated MLP. heads, kv_heads and inner (the MLP's) are per layer."""

    vocab: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    inner: int

    @property
    def layer_rows(self) -> int:
        """Output rows of a layer's matrices: q, k and v, o, gate and up, down."""
        return (self.heads + 2 * self.kv_heads) * self.head_dim + self.hidden + 2 * self.inner + self.hidden

    @property
    def layer_weights(self) -> int:
        attention = (2 * self.heads + 2 * self.kv_heads) * self.head_dim * self.hidden
        return attention + 3 * self.hidden * self.inner

    @property
    def head_weights(self) -> int:
        return self.vocab * self.hidden


@dataclass(frozen=True, slots=True)
class Format:
    """How weights and KV are kept. Bytes of a weight in layers and head, of a scale per output row, of a KV value and
    of a scale per KV head and token. multiply, attend: the kinds of dot product that weights and KV take part in."""

    name: str
    layer_bytes: float
    head_bytes: float
    row_bytes: int
    kv_bytes: int
    kv_scale_bytes: int
    multiply: str
    attend: str

    def weight_bytes(self, model: ModelSize) -> float:
        layer = model.layer_weights * self.layer_bytes + model.layer_rows * self.row_bytes
        return model.layers * layer + model.head_weights * self.head_bytes + model.vocab * self.row_bytes

    def kv_token_bytes(self, model: ModelSize) -> int:
        entry = model.head_dim * self.kv_bytes + self.kv_scale_bytes
        return model.layers * 2 * model.kv_heads * entry


Q4_1_BYTES = 20 / 32  # a block of 32 weights: 16 bytes of nibbles, scale and minimum as float16
Q8_0_BYTES = 34 / 32  # 32 int8 and a float16 scale

# 4-bit is what the small default model ships: layers in Q4_1, the embedding, which is also the head, in Q8_0.
FORMATS = (
    Format("bf16", 2, 2, 0, 2, 0, "bf16", "bf16"),
    Format("int8, int8 KV", 1, 1, FLOAT_BYTES, 1, FLOAT_BYTES, "int8", "int8"),
    Format("4-bit, bf16 KV", Q4_1_BYTES, Q8_0_BYTES, 0, 2, 0, "int8", "bf16"),
)


@dataclass(frozen=True, slots=True)
class Step:
    """`rows` sequences that each compute `new` tokens after `past` ones, and sample one."""

    name: str
    rows: int
    new: int
    past: int

    def bytes_moved(self, model: ModelSize, form: Format) -> float:
        """All weights once; the KV of past tokens read, that of new ones written. Not counted, as they are below 1 % or
        stay in a cache: activations, embedding rows, norm weights, logits, and KV that the same step reads again."""
        return form.weight_bytes(model) + self.rows * (self.past + self.new) * form.kv_token_bytes(model)

    def weight_operations(self, model: ModelSize) -> int:
        """Of the matrices; the head only for the token that samples."""
        return 2 * self.rows * (self.new * model.layers * model.layer_weights + model.head_weights)

    def attention_operations(self, model: ModelSize) -> int:
        """Two products (scores, values) with every token that a token may see, itself included."""
        seen = self.new * self.past + self.new * (self.new + 1) // 2
        return 2 * 2 * self.rows * seen * model.layers * model.heads * model.head_dim


PROMPT, OUTPUT, BATCH = 512, 128, 32
MEAN_CONTEXT = PROMPT + OUTPUT // 2
STEPS = (
    Step("prefill 512", 1, PROMPT, 0),
    Step("prefill 4096", 1, 4096, 0),
    *(Step(f"decode, batch {rows}", rows, 1, MEAN_CONTEXT - 1) for rows in (1, 8, BATCH)),
)


@dataclass(frozen=True, slots=True)
class Ceilings:
    """Of all threads together. read: bytes of the buffer to GB/s. peak: kind to GFLOP/s (GOP/s for int8)."""

    read: dict[int, float]
    peak: dict[str, float]

    def bandwidth(self, size: float) -> float:
        """GB/s for data of `size` bytes that are read again in every step: a cache may hold part of them. Between the
        sizes that were measured it changes evenly with the logarithm of the size."""
        sizes = sorted(self.read)
        for small, large in pairwise(sizes):
            if small <= size <= large:
                share = math.log(size / small) / math.log(large / small)
                return self.read[small] + share * (self.read[large] - self.read[small])
        return self.read[sizes[0] if size <= sizes[0] else sizes[-1]]


def floor(model: ModelSize, form: Format, step: Step, ceilings: Ceilings) -> dict[str, Any]:
    """Both floors of a step in milliseconds, which one binds, and the most tokens a second."""
    moved = step.bytes_moved(model, form)
    weights, attention = step.weight_operations(model), step.attention_operations(model)
    memory_ms = moved / ceilings.bandwidth(moved) / 1e6
    compute_ms = (weights / ceilings.peak[form.multiply] + attention / ceilings.peak[form.attend]) / 1e6
    floor_ms = max(memory_ms, compute_ms)
    return {
        "format": form.name,
        "step": step.name,
        "megabytes": moved / 1e6,
        "giga_operations": (weights + attention) / 1e9,
        "memory_ms": memory_ms,
        "compute_ms": compute_ms,
        "floor_ms": floor_ms,
        "bound": "memory" if memory_ms > compute_ms else "compute",
        "tokens_per_s": step.rows * step.new / floor_ms * 1e3,
    }


def batch_floor(floors: list[dict[str, Any]], form: Format) -> dict[str, Any]:
    """32 requests of 512 tokens that each make 128: the prefills, then 127 steps of decoding all."""
    times = {entry["step"]: entry["floor_ms"] for entry in floors if entry["format"] == form.name}
    seconds = (BATCH * times["prefill 512"] + (OUTPUT - 1) * times[f"decode, batch {BATCH}"]) / 1e3
    return {
        "format": form.name,
        "seconds": seconds,
        "output_tokens_per_s": BATCH * OUTPUT / seconds,
        "total_tokens_per_s": BATCH * (PROMPT + OUTPUT) / seconds,
    }


def read_model(name: str) -> ModelSize:
    """From the model's config. SystemExit with the reason when it cannot be had or is of another kind."""
    from kllm.hub import ModelSourceError, resolve
    from kllm.hub.model_config import read_config
    from kllm.models.model_config import ModelConfig
    from kllm.models.weights.interface import WeightError

    try:
        config = ModelConfig(read_config(resolve(name)), name)
        for field in ("kv_lora_rank", "n_routed_experts", "num_experts"):
            if config.has(field):
                raise config.error(field, "is given: floors are known for grouped-query attention and plain MLPs only")
        hidden, heads = config.integer("hidden_size"), config.integer("num_attention_heads")
        return ModelSize(
            vocab=config.integer("vocab_size"),
            hidden=hidden,
            layers=config.integer("num_hidden_layers"),
            heads=heads,
            kv_heads=config.integer("num_key_value_heads", heads),
            head_dim=config.integer("head_dim", max(1, hidden // heads)),
            inner=config.integer("intermediate_size"),
        )
    except (ModelSourceError, WeightError) as error:
        raise SystemExit(f"ceilings: {error}") from error


def measure(threads: int, rounds: int, seconds: float, console: Console) -> dict[str, Any]:
    """The ceilings as --json prints them: the best of `rounds` short measurements each, since whatever else runs can
    only make one slower."""
    try:
        import kllm.kernels.cpu._native as _native
    except ImportError as error:
        raise SystemExit(
            f"ceilings: the native extension kllm.kernels.cpu._native is missing ({error}); it is built when kLLM is "
            "installed on an x86-64 machine with a C++ compiler. Without it, --from FILE computes floors from ceilings "
            "measured elsewhere."
        ) from error

    counts = sorted({1, threads})
    tasks: list[tuple[str, Any, int]] = [("read_gb_s", size, count) for count in counts for size in SIZES]
    tasks += [("peak_gop_s", kind, count) for count in counts for kind in KINDS]
    result: dict[str, Any] = {"read_gb_s": {}, "peak_gop_s": {}}
    for what, key, count in track(tasks, "measuring", console=console, transient=True):
        probe = _native.read_bandwidth if what == "read_gb_s" else _native.dot_rate
        best = max(probe(key, count, seconds) for _ in range(rounds))
        if best == 0:
            raise SystemExit(f"ceilings: this CPU has no vector instructions for {key} that kLLM knows")
        result[what].setdefault(str(count), {})[str(key)] = round(best, 1)
    return {
        "machine": {"cpu": cpu_name(), "threads": threads},
        "instructions": {kind: _native.dot_instructions(kind) for kind in KINDS},
        **result,
    }


def cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())


def read_ceilings(path: Path) -> dict[str, Any]:
    """What an earlier --json printed. SystemExit when it is something else."""
    try:
        measured = json.loads(path.read_text())
        all_threads(measured)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise SystemExit(f"ceilings: {path} does not hold ceilings as --json prints them ({error!r})") from error
    return measured


def all_threads(measured: dict[str, Any]) -> Ceilings:
    """The ceilings with every thread. Raises ValueError, KeyError or TypeError for what is not complete."""
    threads = str(measured["machine"]["threads"])
    read = {int(size): float(rate) for size, rate in measured["read_gb_s"][threads].items()}
    peak = {kind: float(measured["peak_gop_s"][threads][kind]) for kind in ("bf16", "int8")}
    rates = [*read.values(), *peak.values()]
    if not read or not all(math.isfinite(rate) and rate > 0 for rate in rates):
        raise ValueError("every rate must be a positive number")
    return Ceilings(read, peak)


def show_ceilings(measured: dict[str, Any], console: Console) -> None:
    machine = measured["machine"]
    counts = list(measured["read_gb_s"])
    table = Table(title=f"Ceilings of {machine['cpu']}", title_justify="left")
    table.add_column("")
    for count in counts:
        table.add_column(f"{count} thread{'s' if count != '1' else ''}", justify="right")
    for size in measured["read_gb_s"][counts[-1]]:
        rates = (measured["read_gb_s"][count].get(size) for count in counts)
        table.add_row(f"read {int(size) / MIB:,.0f} MiB", *(f"{rate:.1f} GB/s" if rate else "" for rate in rates))
    for kind in measured["peak_gop_s"][counts[-1]]:
        rates = (measured["peak_gop_s"].get(count, {}).get(kind) for count in counts)
        unit = "GOP/s" if kind == "int8" else "GFLOP/s"
        instructions = measured.get("instructions", {}).get(kind)
        title = f"{kind} ({instructions})" if instructions else kind
        table.add_row(title, *(f"{rate:,.0f} {unit}" if rate else "" for rate in rates))
    console.print(table)


def show_floors(report: dict[str, Any], console: Console) -> None:
    table = Table(title=f"Floors of {report['model']}, all threads", title_justify="left")
    for column in ("format", "step"):
        table.add_column(column)
    for column in ("MB", "G operations", "memory ms", "compute ms", "binds", "at most tokens/s"):
        table.add_column(column, justify="right")
    for entry in report["floors"]:
        numbers = (f"{entry[key]:,.1f}" for key in ("megabytes", "giga_operations", "memory_ms", "compute_ms"))
        last = entry["step"] == STEPS[-1].name
        table.add_row(
            entry["format"],
            entry["step"],
            *numbers,
            entry["bound"],
            f"{entry['tokens_per_s']:,.0f}",
            end_section=last,
        )
    console.print(table)
    table = Table(title=f"{BATCH} × ({PROMPT} in + {OUTPUT} out), at most", title_justify="left")
    table.add_column("format")
    for column in ("seconds", "output tokens/s", "total tokens/s"):
        table.add_column(column, justify="right")
    for entry in report["batch"]:
        rates = (f"{entry[key]:,.0f}" for key in ("output_tokens_per_s", "total_tokens_per_s"))
        table.add_row(entry["format"], f"{entry['seconds']:.2f}", *rates)
    console.print(table)


def main() -> None:
    from kllm.resources import available_cores

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", default="smollm2")
    parser.add_argument("--threads", type=int, default=available_cores())
    parser.add_argument("--rounds", type=int, default=10, help="measurements of which the best counts")
    parser.add_argument("--seconds", type=float, default=0.05, help="of one measurement")
    parser.add_argument("--from", dest="source", type=Path, help="ceilings from a file, nothing is measured")
    parser.add_argument("--json", action="store_true", help="one JSON object as the last line")
    arguments = parser.parse_args()
    if not (1 <= arguments.threads <= 1024 and arguments.rounds >= 1 and 0 < arguments.seconds <= 60):
        parser.error("threads (at most 1024), rounds and seconds (at most 60) must be positive")
    model = read_model(arguments.model)
    console = Console(stderr=arguments.json)
    if arguments.source is not None:
        measured = read_ceilings(arguments.source)
    else:
        measured = measure(arguments.threads, arguments.rounds, arguments.seconds, Console(file=sys.stderr))
    ceilings = all_threads(measured)
    floors = [floor(model, form, step, ceilings) for form in FORMATS for step in STEPS]
    batch = [batch_floor(floors, form) for form in FORMATS]
    report = {**measured, "model": arguments.model, "floors": floors, "batch": batch}
    show_ceilings(measured, console)
    show_floors(report, console)
    if arguments.json:
        print(json.dumps(report))


if __name__ == "__main__":
    main()
