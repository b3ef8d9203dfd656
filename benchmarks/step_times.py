"""Step times of every model preset on every hardware preset that holds it, and what asking for one costs.

    python benchmarks/step_times.py        the table of docs/costs.md, and microseconds per question

Decoding is at a context of 1,024 tokens; prefill is one step of prompts of 2,048 tokens, as many as the layout has
groups and at least four. Exit status 1 if a question takes longer than the 5 µs that a simulation can afford.
"""

from __future__ import annotations

import sys
import time

from kllm.costs.capacity import Capacity, Deployment, smallest_gpus
from kllm.costs.errors import DoesNotFitError
from kllm.costs.hardware import HARDWARE, Hardware
from kllm.costs.model_specs import MODELS, ModelSpec
from kllm.costs.roofline import RooflineModel
from kllm.costs.step import StepWork, step_work

CONTEXT = 1024
PROMPT = 2048
BATCHES = (1, 32, 256)
LIMIT_S = 5e-6


def decode_work(model: ModelSpec, rows: int) -> StepWork:
    return step_work([(CONTEXT, 1, True)] * rows, model.top_k)


def table_row(model: ModelSpec, hardware: Hardware, found: Capacity) -> str:
    times = RooflineModel(hardware, model, found.layout)
    cells = [hardware.name, f"{found.layout}", f"{found.tokens / 1e6:,.2f} M"]
    for rows in BATCHES:
        fits = rows * (CONTEXT + 1) <= found.tokens
        cells.append(f"{times.seconds(decode_work(model, rows)) * 1e3:.1f}" if fits else "no room")
    work = step_work([(0, PROMPT, True)] * max(4, found.layout.dp), model.top_k)
    seconds = times.seconds(work)
    peak = hardware.flops(found.weights_dtype) * found.layout.gpus
    used = 2 * model.active_parameters * work.new_tokens / seconds / peak
    cells += [f"{work.new_tokens / seconds:,.0f}", f"{used:.2f}"]
    return " | ".join(["", model.name, *cells, ""]).strip()


def print_table() -> list[RooflineModel]:
    print("| model | on | smallest layout | KV tokens | TPOT at 1, ms | at 32 | at 256 | prefill, tokens/s | MFU |")
    print("|---|---|---|---|---|---|---|---|---|")
    models = []
    for model in MODELS.values():
        for hardware in HARDWARE.values():
            try:
                found = smallest_gpus(Deployment(model, hardware))
            except DoesNotFitError:
                continue
            print(table_row(model, hardware, found))
            models.append(RooflineModel(hardware, model, found.layout))
    return models


def slowest_question(models: list[RooflineModel], repeats: int = 2000) -> float:
    """Seconds of one call of `seconds`, of the slowest model, each the best of five."""
    slowest = 0.0
    for model in models:
        work = decode_work(model.model, 32)
        best = float("inf")
        for _ in range(5):
            begin = time.perf_counter()
            for _ in range(repeats):
                model.seconds(work)
            best = min(best, (time.perf_counter() - begin) / repeats)
        slowest = max(slowest, best)
    return slowest


def main() -> None:
    seconds = slowest_question(print_table())
    print(f"\none question: {seconds * 1e6:.1f} µs at most")
    if seconds > LIMIT_S:
        sys.exit(f"slower than {LIMIT_S * 1e6:.0f} µs")


if __name__ == "__main__":
    main()
