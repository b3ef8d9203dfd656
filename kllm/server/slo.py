"""GET /debug/slo: SLO Load of pools and instances, and what it was made from."""

from __future__ import annotations

from typing import Any, Literal

import msgspec
from fastapi import APIRouter
from fastapi.responses import Response
from pydantic import Field

from kllm.cluster.slo_snapshot import InstanceSlo, PoolSlo, Side
from kllm.server import openapi
from kllm.server.errors import json_response
from kllm.server.responses import Reply
from kllm.server.service import Service


class SideReply(Reply):
    load: float = Field(description="The larger of predicted and measured; at 1 the SLO is just met.")
    larger: Literal["predicted", "measured"]
    predicted: float = Field(description="predicted_s over slo_s; 0 while nothing is known.")
    measured: float = Field(description="measured_s over slo_s.")
    predicted_s: float | None = Field(description="Of a typical next request; null until steps have been seen.")
    measured_s: float = Field(description="Nine in ten requests of the window are not above it.")
    slo_s: float
    samples: int = Field(description="Requests in the window, those that go on included.")


class PoolReply(SideReply):
    instances: int
    chosen: int | None = Field(description="The instance that the prediction is of: where it is the least.")


class StepTimesReply(Reply):
    """Seconds of a step: base + row * rows + new_token * tokens computed + context_token * KV entries read."""

    base: float
    row: float
    new_token: float
    context_token: float
    samples: int = Field(description="Steps that this was fitted to.")


class InstanceReply(Reply):
    instance: int
    role: Literal["both", "prefill", "decode"]
    prefill: SideReply | None
    decode: SideReply | None
    kv_guard: float = Field(description="KV held and coming over the high-water mark; not part of the load.")
    tokens_ahead: float = Field(description="Uncached prompt tokens to compute before those of a new request.")
    waiting: int
    decoding: int
    joining: float = Field(description="Requests that will decode here and do not yet.")
    context: int = Field(description="Tokens whose KV running requests hold.")
    prompt_tokens_per_s: float
    typical_output_tokens: float
    step_times: StepTimesReply | None


class SloResponse(Reply):
    grade: int = Field(description="Of degradation: 0, nothing is given up, to 3. Above 0 only with degrade on.")
    window_s: float
    waiting: int = Field(description="Requests without a token; they count with their age.")
    decoding: int
    typical_uncached_tokens: float = Field(description="Of the prompt of a typical request, what must be computed.")
    typical_prompt_tokens: float
    pools: dict[str, PoolReply]
    instances: list[InstanceReply]


def slo_routes(service: Service) -> APIRouter:
    router = APIRouter()

    @router.get(
        "/debug/slo",
        response_model=SloResponse,
        responses=openapi.errors(401, 403),
        summary="SLO Load: how much of what the service level objectives allow is used, and why.",
    )
    async def slo() -> Response:
        now = service.gateway.slo_snapshot()
        return json_response(
            {
                "grade": service.gateway.grade,
                "window_s": now.window_s,
                "waiting": now.waiting,
                "decoding": now.decoding,
                "typical_uncached_tokens": now.typical_uncached,
                "typical_prompt_tokens": now.typical_prompt,
                "pools": {name: _pool(pool) for name, pool in now.pools.items()},
                "instances": [_instance(instance) for instance in now.instances],
            }
        )

    return router


def _side(side: Side) -> dict[str, Any]:
    figures = {"load": side.load, "larger": side.larger, "predicted": side.predicted, "measured": side.measured}
    return figures | msgspec.structs.asdict(side)


def _pool(pool: PoolSlo) -> dict[str, Any]:
    return _side(pool.side) | {"instances": pool.instances, "chosen": pool.chosen}


def _instance(instance: InstanceSlo) -> dict[str, Any]:
    load, demand = instance.report.load, instance.demand
    return {
        "instance": instance.index,
        "role": instance.role,
        "prefill": None if instance.prefill is None else _side(instance.prefill),
        "decode": None if instance.decode is None else _side(instance.decode),
        "kv_guard": instance.kv_guard,
        "tokens_ahead": demand.ahead,
        "waiting": load.waiting,
        "decoding": load.decoding,
        "joining": demand.joining,
        "context": load.context,
        "prompt_tokens_per_s": demand.token_rate,
        "typical_output_tokens": demand.output,
        "step_times": None if load.step_times is None else msgspec.structs.asdict(load.step_times),
    }
