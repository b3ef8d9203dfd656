"""/debug/fleet: who is there, and changing what one is used for."""

from __future__ import annotations

import pytest
from support.api_server import ApiServer

from kllm.server.responses import FleetResponse, RoleResponse


def test_the_fleet_is_described() -> None:
    with ApiServer() as server, server.client() as client:
        (instance,) = FleetResponse.model_validate(client.get("/debug/fleet").json()).instances
        assert (instance.index, instance.state, instance.incarnation) == (0, "ready", "1")
        assert (instance.address, instance.trouble, instance.requests) == (None, None, 0)
        assert instance.load["running"] == 0


@pytest.mark.parametrize("path", ["/debug/fleet/role", "/pd_role_switch"])
def test_a_role_is_changed(path: str) -> None:
    with ApiServer() as server, server.client() as client:
        reply = client.post(path, json={"instance": 0, "role": "decode"})
        assert RoleResponse.model_validate(reply.json()) == RoleResponse(instance=0, role="decode", done=True)
        (instance,) = client.get("/debug/fleet").json()["instances"]
        assert (instance["role"], instance["term"]) == ("decode", 1)
        client.post(path, json={"instance": 0, "role": "prefill"})
        (instance,) = client.get("/debug/fleet").json()["instances"]
        assert (instance["role"], instance["term"]) == ("prefill", 2)


def test_what_is_refused() -> None:
    with ApiServer(api_key=["secret"]) as server:
        with server.client() as stranger:
            assert stranger.get("/debug/fleet").status_code == 401
            assert stranger.post("/debug/fleet/role", json={"instance": 0, "role": "both"}).status_code == 401
        with server.client(Authorization="Bearer secret") as client:
            answer = client.post("/debug/fleet/role", json={"instance": 9, "role": "both"})
            assert (answer.status_code, answer.json()["error"]["param"]) == (404, "instance")
            answer = client.post("/debug/fleet/role", json={"instance": 0, "role": "cook"})
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, "role")
