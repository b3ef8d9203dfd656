"""/debug/fleet: the gateway's instances, and what they are used for."""

from __future__ import annotations

from typing import Any

import msgspec
from fastapi import APIRouter, Request
from fastapi.responses import Response

from kllm.cluster.slot import Slot
from kllm.server import openapi
from kllm.server.bodies import read_body
from kllm.server.errors import ApiError, json_response
from kllm.server.protocol import RoleRequest
from kllm.server.responses import FleetResponse, RoleResponse
from kllm.server.service import Service


def fleet_routes(service: Service) -> APIRouter:
    router = APIRouter()

    @router.get(
        "/debug/fleet",
        response_model=FleetResponse,
        responses=openapi.errors(401, 403),
        summary="The instances: where they are, what they are used for, and what they say of themselves.",
    )
    async def fleet() -> Response:
        return json_response({"instances": [describe(slot) for slot in service.gateway.slots]})

    answers: dict[str, Any] = {
        "response_model": RoleResponse,
        "responses": openapi.errors(400, 401, 403, 404, 413, 415),
        "openapi_extra": openapi.takes(RoleRequest),
    }

    @router.post(
        "/debug/fleet/role",
        summary="Let an instance finish what it has, and use it for something else. Takes as long as that does.",
        **answers,
    )
    async def role(request: Request) -> Response:
        return await _change_role(service, request)

    @router.post("/pd_role_switch", summary="The same as /debug/fleet/role.", **answers)
    async def pd_role_switch(request: Request) -> Response:
        return await _change_role(service, request)

    return router


async def _change_role(service: Service, request: Request) -> Response:
    body = await read_body(request, RoleRequest, service.config.max_body_bytes, service.workers)
    try:
        done = await service.gateway.set_role(body.instance, body.role)
    except KeyError:
        raise ApiError(404, f"There is no instance {body.instance}.", param="instance") from None
    return json_response({"instance": body.instance, "role": body.role, "done": done})


def describe(slot: Slot) -> dict[str, Any]:
    """One instance, as FleetInstance."""
    hello = slot.hello
    load = msgspec.to_builtins(msgspec.structs.asdict(slot.load))
    del load["progress"]  # of every request: there is a count of them beside it
    return {
        "index": slot.index,
        "address": slot.address,
        "state": slot.state,
        "trouble": slot.trouble or slot.error,
        "instance_id": None if hello is None else hello.instance_id,
        "incarnation": None if hello is None else hello.incarnation,
        "model": None if hello is None else hello.model,
        "role": slot.role,
        "term": slot.term,
        "requests": len(slot.assigned),
        "restarts": slot.restarts,
        "silent_s": None if slot.silent_s is None else round(slot.silent_s, 3),
        "load": load,
    }
