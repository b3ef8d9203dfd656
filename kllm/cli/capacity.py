"""`kllm capacity`: how many tokens of KV a model's instance holds on given hardware, from arithmetic alone."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kllm.cli.errors import UsageError

if TYPE_CHECKING:
    from kllm.costs.capacity import Capacity, Deployment

_MODELS = "smollm2-135m, llama-70b, deepseek-v3, glm-5.2, kimi-k2, deepseek-v4-flash"
_HARDWARE = "h100, h200, b200, b300, h20, this-machine"


def capacity(
    model: Annotated[str, typer.Option(help=f"One of {_MODELS}.")],
    hardware: Annotated[str, typer.Option(help=f"One of {_HARDWARE}.")],
    gpus: Annotated[
        int | None,
        typer.Option(min=1, max=1024, help="GPUs of the instance [default: the smallest power of two that fits]"),
    ] = None,
    layout: Annotated[
        str | None,
        typer.Option(help="How the model is spread: tp8, tp8ep8, dp8ep8, dp2tp4ep8 [default: what holds most tokens]"),
    ] = None,
    weights_dtype: Annotated[
        str | None, typer.Option(help="bf16, fp8, int8 or fp4 [default: as the model is published]")
    ] = None,
    kv_dtype: Annotated[
        str | None, typer.Option(help="bf16, fp8 or, for grouped attention, int8 [default: as the model is served]")
    ] = None,
    mtp: Annotated[bool, typer.Option("--mtp/--no-mtp", help="With the MTP layer: its weights and its KV.")] = False,
    usable_memory_gb: Annotated[
        float | None,
        typer.Option(
            help="10^9 bytes of a GPU that the engine fills with weights, activations and KV "
            "[default: 90 % of what is left beside 3.5 GiB]"
        ),
    ] = None,
    activation_gb: Annotated[
        float | None, typer.Option(help="10^9 bytes of a GPU held back for activations [default: 4]")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")] = False,
) -> None:
    """KV capacity of one instance: weights and KV bytes per GPU, and the tokens that fit."""
    from kllm.costs.capacity import Deployment
    from kllm.costs.errors import CostError
    from kllm.costs.hardware import find_hardware
    from kllm.costs.model_specs import find_model

    try:
        deployment = Deployment(
            find_model(model),
            find_hardware(hardware),
            weights_dtype=weights_dtype,
            kv_dtype=kv_dtype,
            mtp=mtp,
            usable_bytes=_bytes("--usable-memory-gb", usable_memory_gb),
            activation_bytes=_bytes("--activation-gb", activation_gb),
        )
        found = _find(deployment, gpus, layout)
    except CostError as error:
        raise UsageError(str(error)) from error
    if as_json:
        print(json.dumps(_report(deployment, found)))
    else:
        _print_table(deployment, found)


def _bytes(flag: str, gigabytes: float | None) -> float | None:
    if gigabytes is not None and not 0 <= gigabytes < 1e6:
        raise UsageError(f"{flag}: not a size in GB: {gigabytes:g}")
    return None if gigabytes is None else gigabytes * 1e9


def _find(deployment: Deployment, gpus: int | None, layout: str | None) -> Capacity:
    """In the layout asked for, or the best one. Raises CostError."""
    from kllm.costs.capacity import best_layout, kv_capacity, smallest_gpus
    from kllm.costs.layout import parse_layout

    memory = deployment.hardware.memory_bytes
    if deployment.usable_bytes is not None and deployment.usable_bytes > memory:
        raise UsageError(f"--usable-memory-gb: {deployment.hardware.name} has {memory / 1e9:.1f} GB")
    if layout is not None:
        parsed = parse_layout(layout)
        if gpus is not None and gpus != parsed.gpus:
            raise UsageError(f"--gpus {gpus}: layout {layout} is one of {parsed.gpus} GPUs")
        return kv_capacity(deployment, parsed)
    return smallest_gpus(deployment) if gpus is None else best_layout(deployment, gpus)


def _report(deployment: Deployment, found: Capacity) -> dict[str, Any]:
    """Every figure, and which of the presets' figures are uncertain."""
    figures = asdict(found) | {"layout": str(found.layout), "gpus": found.layout.gpus}
    for name in ("kv_bytes_per_token", "kv_bytes_per_token_per_gpu"):
        figures[name] = int(figures[name]) if figures[name] == int(figures[name]) else figures[name]
    figures["uncertain"] = {
        "model": sorted(deployment.model.uncertain),
        "hardware": sorted(deployment.hardware.uncertain),
    }
    return figures


def _print_table(deployment: Deployment, found: Capacity) -> None:
    from rich.console import Console
    from rich.table import Table

    def gb(size: float) -> str:
        return f"{size / 1e9:.1f} GB"

    gpus = found.layout.gpus
    mtp = ", MTP layer" if found.mtp else ""
    formats = f"{found.weights_dtype} weights, {found.kv_dtype} KV{mtp}"
    table = Table(
        title=f"{found.model} as {found.layout} on {gpus} × {found.hardware}: {formats}",
        show_header=False,
        title_justify="left",
    )
    table.add_column()
    table.add_column(justify="right")
    table.add_row("usable memory of a GPU", gb(found.usable_bytes_per_gpu))
    table.add_row("weights on a GPU", gb(found.weight_bytes_per_gpu))
    table.add_row("activations on a GPU", gb(found.activation_bytes_per_gpu))
    table.add_row("KV on a GPU", gb(found.kv_bytes_per_gpu))
    table.add_row("KV of a token", f"{found.kv_bytes_per_token:,.0f} B")
    table.add_row("KV of a token on a GPU that keeps it", f"{found.kv_bytes_per_token_per_gpu:,.0f} B")
    if found.state_bytes_per_request:
        table.add_row("besides, of a running request", f"{found.state_bytes_per_request / 1e6:.1f} MB")
    if found.layout.dp > 1:
        table.add_row(f"tokens in each of {found.layout.dp} groups", f"{found.tokens_per_group:,}")
    table.add_row("tokens", f"{found.tokens:,}", style="bold")
    table.add_row("price (assumed)", f"${found.dollars_per_hour:,.2f} an hour")
    console = Console()
    console.print(table)
    uncertain = {deployment.model.name: deployment.model.uncertain, found.hardware: deployment.hardware.uncertain}
    for name, fields in uncertain.items():
        if fields:
            console.print(f"uncertain figures of {name}: {', '.join(sorted(fields))}", style="dim")
