"""Batched generation: kLLM beside transformers' static batch and its `generate_batch`, in one run.

    python benchmarks/against_transformers.py [MODEL] [--num-prompts 32 --input-len 512 --output-len 128] [--json]

Every engine is a process of its own that loads once and then runs a round when told, so that rounds alternate
(kllm, static, continuous, kllm, …) and a noisy machine disturbs all of them alike; only one works at a time. The
same random prompts, greedy, exactly output-len tokens, bfloat16, the same number of threads; medians of the rounds.
transformers lives in the virtual environment that `make oracle` makes. Its `generate_batch` takes its cache anew in
every call, which is part of its time; `--engines static` leaves it out.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

ENGINES = ("kllm", "static", "continuous")
ORACLE_PYTHON = Path(__file__).parents[1] / ".venv-oracle" / "bin" / "python"


class Worker:
    """One engine's process: a line of JSON in (the prompts), a line of JSON out (the seconds it took)."""

    def __init__(self, engine: str, arguments: argparse.Namespace, path: str) -> None:
        python = sys.executable if engine == "kllm" else str(ORACLE_PYTHON)
        command = [python, __file__, path, "--worker", engine, "--output-len", str(arguments.output_len)]
        command += ["--threads", str(arguments.threads)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def round(self, prompts: list[list[int]]) -> float:
        """Seconds for these prompts. The answer is checked to have every token."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(prompts) + "\n")
        self._process.stdin.flush()
        for line in self._process.stdout:
            if line.startswith("RESULT "):
                return float(json.loads(line[7:])["seconds"])
        raise SystemExit(f"a worker ended with status {self._process.wait()}")

    def close(self) -> None:
        self._process.communicate()


def work(engine: str, path: str, output_len: int, threads: int) -> None:
    """The worker's side: load, then answer rounds until the input ends."""
    run = {"kllm": load_kllm, "static": load_static, "continuous": load_continuous}[engine](path, output_len, threads)
    for line in sys.stdin:
        prompts = json.loads(line)
        start = time.perf_counter()
        tokens = run(prompts)
        seconds = time.perf_counter() - start
        expected = len(prompts) * output_len
        if tokens != expected:
            raise SystemExit(f"{engine} made {tokens} tokens instead of {expected}")
        print("RESULT " + json.dumps({"seconds": seconds}), flush=True)


def load_kllm(path: str, output_len: int, threads: int) -> Any:
    from kllm import LLM, SamplingParams

    llm = LLM(path, dtype="bfloat16", threads=threads)
    params = SamplingParams(temperature=0.0, max_tokens=output_len, ignore_eos=True, detokenize=False)

    def run(prompts: list[list[int]]) -> int:
        outputs = llm.generate(prompts, params, progress=False)
        return sum(len(output.outputs[0].token_ids) for output in outputs)

    return run


def load_transformers(path: str, threads: int) -> Any:
    import torch
    from transformers import AutoModelForCausalLM, GgufConfig

    torch.set_num_threads(threads)
    options: dict[str, Any] = {"dtype": torch.bfloat16, "attn_implementation": "sdpa"}
    if path.endswith(".gguf"):
        options |= {"gguf_file": Path(path).name, "quantization_config": GgufConfig(dequantize=True)}
        path = str(Path(path).parent)
    return AutoModelForCausalLM.from_pretrained(path, **options).eval()


def load_static(path: str, output_len: int, threads: int) -> Any:
    import torch

    model = load_transformers(path, threads)

    def run(prompts: list[list[int]]) -> int:
        ids = torch.tensor(prompts)
        lengths = {"max_new_tokens": output_len, "min_new_tokens": output_len, "do_sample": False}
        with torch.inference_mode():
            output = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), **lengths)
        return int(output.shape[0] * (output.shape[1] - ids.shape[1]))

    return run


def load_continuous(path: str, output_len: int, threads: int) -> Any:
    from transformers import GenerationConfig

    model = load_transformers(path, threads)
    config = GenerationConfig(max_new_tokens=output_len, do_sample=False, eos_token_id=-1, pad_token_id=2)

    def run(prompts: list[list[int]]) -> int:
        outputs = model.generate_batch(inputs=prompts, generation_config=config, progress_bar=False)
        return sum(len(output.generated_tokens) for output in outputs.values())

    return run


def random_prompts(seed: int, count: int, length: int, vocab_size: int) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(256, vocab_size) for _ in range(length)] for _ in range(count)]


def compare(arguments: argparse.Namespace, engines: list[str]) -> dict[str, Any]:
    from kllm.hub import resolve

    path = str(resolve(arguments.model).path)
    workers = {engine: Worker(engine, arguments, path) for engine in engines}
    seconds: dict[str, list[float]] = {engine: [] for engine in engines}
    for worker in workers.values():
        worker.round(random_prompts(0, 2, 32, arguments.vocab_size))
    for index in range(arguments.rounds):
        prompts = random_prompts(index + 1, arguments.num_prompts, arguments.input_len, arguments.vocab_size)
        for engine, worker in workers.items():
            seconds[engine].append(worker.round(prompts))
            print(f"round {index + 1}: {engine} {seconds[engine][-1]:.2f} s", file=sys.stderr)
    for worker in workers.values():
        worker.close()
    made = arguments.num_prompts * arguments.output_len
    total = arguments.num_prompts * (arguments.input_len + arguments.output_len)
    medians = {engine: median(times) for engine, times in seconds.items()}
    return {
        "model": arguments.model,
        "num_prompts": arguments.num_prompts,
        "input_len": arguments.input_len,
        "output_len": arguments.output_len,
        "threads": arguments.threads,
        "rounds_s": {engine: [round(value, 3) for value in times] for engine, times in seconds.items()},
        "output_tokens_per_s": {engine: round(made / value, 1) for engine, value in medians.items()},
        "total_tokens_per_s": {engine: round(total / value, 1) for engine, value in medians.items()},
        "kllm_over": {e: round(medians[e] / medians["kllm"], 3) for e in engines if e != "kllm"},
    }


def print_table(report: dict[str, Any], to_stderr: bool) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"{report['num_prompts']} × ({report['input_len']} in + {report['output_len']} out)")
    for column in ("engine", "output tokens/s", "total tokens/s", "kllm is faster by"):
        table.add_column(column, justify="left" if column == "engine" else "right")
    for engine, rate in report["output_tokens_per_s"].items():
        ratio = report["kllm_over"].get(engine)
        cells = (f"{rate:.1f}", f"{report['total_tokens_per_s'][engine]:.1f}", f"{ratio:.2f}×" if ratio else "")
        table.add_row(engine if engine == "kllm" else f"transformers, {engine}", *cells)
    Console(stderr=to_stderr).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", default="smollm2")
    parser.add_argument("--num-prompts", type=int, default=32)
    parser.add_argument("--input-len", type=int, default=512)
    parser.add_argument("--output-len", type=int, default=128)
    parser.add_argument("--vocab-size", type=int, default=32000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--engines", default=",".join(ENGINES), help="kllm and any of static, continuous")
    parser.add_argument("--json", action="store_true", help="one JSON object as the last line")
    parser.add_argument("--worker", choices=ENGINES, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        work(arguments.worker, arguments.model, arguments.output_len, arguments.threads)
        return
    engines = ["kllm", *(e for e in arguments.engines.split(",") if e != "kllm")]
    if unknown := set(engines) - set(ENGINES):
        parser.error(f"unknown engines: {', '.join(sorted(unknown))}")
    if not ORACLE_PYTHON.exists():
        parser.error(f"{ORACLE_PYTHON} is missing: run `make oracle` first")
    report = compare(arguments, engines)
    print_table(report, to_stderr=arguments.json)
    if arguments.json:
        print(json.dumps(report))


if __name__ == "__main__":
    main()
