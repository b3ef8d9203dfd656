"""A run's summary as tables for the terminal."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from kllm.simulation import formats

_LATENCIES = {"ttft_s": "Time to first token", "tpot_s": "Time per output token", "e2e_s": "Whole request"}
_COLUMNS = ("mean", "p50", "p90", "p95", "p99")
_MOST_INSTANCES = 16  # rows; more say little in a terminal, the page and the JSON have all
_MOST_LINES = 12  # notes, and faults, likewise


def print_summary(summary: dict[str, Any], console: Console) -> None:
    """Latencies, key figures, instances and notes of one `kllm simulate`."""
    console.print(_latency_table(summary))
    console.print(_rows(key_figures(summary)))
    if len(summary["instances"]) > 1:
        console.print(_instance_table(summary["instances"]))
    said = {"Not completed": formats.reasons(summary), "Fault": summary["faults"], "Note": summary["notes"]}
    for title, lines in said.items():
        for line in lines[:_MOST_LINES]:
            console.print(f"{title}: {formats.text(line)}", highlight=False, markup=False)
        if len(lines) > _MOST_LINES:
            console.print(f"{title}: {len(lines) - _MOST_LINES} more", highlight=False)


def key_figures(summary: dict[str, Any]) -> dict[str, str]:
    """What is said below the latencies, as (name, text)."""
    endings = [f"{count:,} {name}" for name, count in summary["endings"].items() if count and name != "completed"]
    rows = {"Completed": f"{summary['completed']:,} of {summary['requests']:,}" + _list(endings)}
    if summary["retried"]:
        rows["Retried"] = f"{summary['retried']:,} requests were resubmitted to another instance"
    if slo := formats.limits(summary["slo"]):
        share = formats.share(summary["slo"]["share"])
        rows["Goodput"] = f"{formats.count(summary['goodput_rps'])} requests/s, {share} of all: {slo}"
    rows |= {
        "Requests/s": formats.count(summary["requests_per_s"]),
        "Output tokens/s": f"{formats.count(summary['output_tokens_per_s'])}"
        f" ({formats.count(summary['output_tokens_per_s_per_gpu'])} per GPU)",
        "Total tokens/s": formats.count(summary["total_tokens_per_s"]),
        "Prefix cache": f"{formats.share(sum(summary['hit_rate'].values()))} of "
        f"{formats.count(summary['prompt_tokens'])} prompt tokens" + _list(list(filter(None, [formats.hits(summary)]))),
        "Busy": f"{formats.share(summary['utilisation'])} of the time, mean of {len(summary['instances'])} instances",
    }
    rows |= dict(formats.tiers(summary))
    if load := formats.load(summary["load"], summary["trace_load"]):
        rows["Load"] = load
    if cost := summary["cost"]:
        rows["Cost"] = (
            f"{formats.dollars(cost['per_million_output_tokens'])} per million output tokens, "
            f"{formats.dollars(cost['per_million_tokens'])} with prompts "
            f"({summary['gpus']:,} GPUs at {formats.dollars(cost['per_gpu_hour'])} an hour)"
        )
    events = {"restarts": summary["restarts"], "preemptions": summary["preemptions"]}
    rows["Steps"] = f"{summary['steps']:,}" + _list([f"{name}: {count:,}" for name, count in events.items() if count])
    if fairness := formats.fairness(summary):
        rows["Fairness"] = fairness
    rows["Simulated"] = f"{formats.seconds(summary['simulated_s'])} in {formats.seconds(summary['wall_s'])}"
    rows["Decisions"] = summary["decision_hash"]
    return rows


def _latency_table(summary: dict[str, Any]) -> Table:
    table = Table(title="Latency of completed requests", title_justify="left")
    table.add_column("")
    for column in _COLUMNS:
        table.add_column(column, justify="right")
    for title, figures in formats.latency_rows(summary, _LATENCIES):
        table.add_row(title, *(formats.seconds(figures[column]) for column in _COLUMNS))
    return table


def _instance_table(instances: list[dict[str, Any]]) -> Table:
    table = Table(title="Instances (means over time, peaks in brackets)", title_justify="left")
    for column in ("", "up", "busy", "running", "waiting", "KV used"):
        table.add_column(column, justify="right")
    for row in instances[:_MOST_INSTANCES]:
        table.add_row(
            str(row["instance"]),
            formats.share(row["up"]),
            formats.share(row["busy"]),
            f"{formats.count(row['running'])} ({row['running_peak']:,})",
            f"{formats.count(row['waiting'])} ({row['waiting_peak']:,})",
            f"{formats.share(row['kv_usage'])} ({formats.share(row['kv_usage_peak'])})",
        )
    if len(instances) > _MOST_INSTANCES:
        table.caption = f"{len(instances) - _MOST_INSTANCES} more are in the JSON and on the page"
    return table


def _rows(rows: dict[str, str]) -> Table:
    table = Table(show_header=False, box=None)
    table.add_column(style="bold", no_wrap=True)
    table.add_column()
    for name, value in rows.items():
        table.add_row(name, escape(value))
    return table


def _list(parts: list[str]) -> str:
    return f" ({', '.join(parts)})" if parts else ""
