"""/debug/routing."""

from __future__ import annotations

import httpx
from support.api_server import ApiServer

from kllm.server.debug import RoutingResponse


def test_decisions_are_shown(client: httpx.Client) -> None:
    before = RoutingResponse.model_validate(client.get("/debug/routing").json()).decisions
    reply = client.post("/v1/completions", json={"prompt": "say:a"}, headers={"X-Request-Id": "shown"})
    assert reply.status_code == 200
    shown = RoutingResponse.model_validate(client.get("/debug/routing").json())
    assert shown.decisions == before + 1
    latest = shown.latest[0]
    assert "shown" in latest.request_id
    assert (latest.instance, latest.reason) == (0, "only one")
    assert latest.why.startswith("only one: 0 of ")
    assert latest.cached is not None
    assert sum(shown.counts.reasons.values()) == shown.decisions
    [instance] = shown.instances
    assert instance.ready
    assert instance.counts.decisions == shown.decisions
    assert 'kllm:routing_decisions_total{engine="0",model_name="tiny",reason="only one"}' in client.get("/metrics").text


def test_it_needs_a_key() -> None:
    with ApiServer(api_key=["first"]) as server, server.client() as client:
        assert client.get("/debug/routing").status_code == 401
        assert client.get("/debug/routing", headers={"Authorization": "Bearer first"}).status_code == 200
