"""GET /debug/routing: which instance the latest requests went to, and why."""

from __future__ import annotations

from typing import Any

import msgspec
from fastapi import APIRouter
from fastapi.responses import Response
from pydantic import Field

from kllm.cluster.routing_log import Decision
from kllm.cluster.routing_view import RoutingView
from kllm.server import openapi
from kllm.server.errors import json_response
from kllm.server.responses import Reply
from kllm.server.service import Service


class WeighedInstance(Reply):
    instance: int
    score: float | None = Field(description="Less is better; null where the router makes no scores.")
    l1: int = Field(description="Leading tokens of the prompt believed to be on its device,")
    l2: int = Field(description="on its device or in its host memory,")
    l3: int = Field(description="or in the shared store.")
    prefilling: int = Field(description="Prompt tokens that it had to compute before this one.")
    assigned: int = Field(description="Requests that it held.")


class RoutingDecision(Reply):
    time_s: float = Field(description="On the gateway's clock, whose zero means nothing.")
    request_id: str
    attempt: int
    prompt_tokens: int
    instance: int
    reason: str
    why: str
    l1: int
    l2: int
    l3: int
    spread: int = Field(description="Between the most and the fewest tokens ahead at an instance.")
    num_candidates: int
    candidates: list[WeighedInstance] = Field(description="The best of them, best first, and the chosen one.")
    handed_over: bool = Field(description="Its KV comes from where it was prefilled.")
    cached: int | None = Field(description="Tokens that the instance then found; null while it has not answered.")


class RoutingCountsReply(Reply):
    reasons: dict[str, int] = Field(description="Decisions.")
    device: int = Field(description="Prompt tokens believed to be on the device of the instance chosen,")
    host: int = Field(description="in its host memory,")
    store: int = Field(description="in the store,")
    nowhere: int = Field(description="or nowhere.")
    spread: int = Field(description="Sum over decisions.")


class InstanceCountsReply(Reply):
    decisions: int
    prompt_tokens: int
    answered: int = Field(description="Prompt tokens of requests that it has begun to answer:")
    believed: int = Field(description="those believed to be cached there,")
    cached: int = Field(description="those that it found,")
    missed: int = Field(description="and those believed that it did not find.")


class KnownCacheReply(Reply):
    sequence: int | None = Field(description="Of its latest report; null: nothing is believed of it.")
    device_blocks: int
    host_blocks: int
    gaps: int = Field(description="Reports found missing.")
    dumps: int = Field(description="Times that it said all it has.")
    unreported_blocks: int = Field(description="Sent there since it last said anything about its cache.")


class RoutedInstance(Reply):
    instance: int
    ready: bool
    role: str
    prefilling: int
    assigned: int
    blind: bool = Field(description="It should say what it caches, and has not.")
    counts: InstanceCountsReply
    cache: KnownCacheReply | None


class DirectoryReply(Reply):
    blocks: int
    bytes: int
    gaps: int
    refused: int = Field(description="Blocks that did not fit.")


class RoutingResponse(Reply):
    decisions: int
    counts: RoutingCountsReply
    directory: DirectoryReply | None = Field(description="What is known of caches; null where nobody asks.")
    instances: list[RoutedInstance]
    latest: list[RoutingDecision] = Field(description="The last ones, newest first.")
    sampled: list[RoutingDecision] = Field(description="One in 64 of those before them, newest first.")


def debug_routes(service: Service) -> APIRouter:
    router = APIRouter()

    @router.get(
        "/debug/routing",
        response_model=RoutingResponse,
        responses=openapi.errors(401, 403),
        summary="Which instance the latest requests went to, and why.",
    )
    async def routing() -> Response:
        return json_response(_as_json(service.routing_view()))

    return router


def _as_json(view: RoutingView) -> dict[str, Any]:
    told: dict[str, Any] = msgspec.to_builtins(
        {name: getattr(view, name) for name in ("decisions", "counts", "directory", "instances")}
    )
    told["latest"] = [_decision(one) for one in reversed(view.latest)]
    told["sampled"] = [_decision(one) for one in reversed(view.sampled)]
    return told


def _decision(decision: Decision) -> dict[str, Any]:
    return {**msgspec.to_builtins(decision), "why": decision.why}
