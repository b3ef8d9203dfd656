from __future__ import annotations

import threading

import httpx
from support.api_server import ApiServer

from kllm.server.slo import SloResponse

TEXT = "/v1/completions"


def test_load_of_the_server(client: httpx.Client) -> None:
    client.post(TEXT, json={"prompt": "say:abcdefgh"}).raise_for_status()
    answer = SloResponse.model_validate(client.get("/debug/slo").json())
    assert set(answer.pools) == {"prefill", "decode"}
    [instance] = answer.instances
    assert instance.prefill is not None
    assert instance.decode is not None
    assert (instance.instance, instance.role, instance.step_times) == (0, "both", None)
    prefill = answer.pools["prefill"]
    assert (prefill.instances, prefill.chosen, prefill.predicted_s, prefill.slo_s) == (1, None, None, 2.0)
    assert prefill.samples >= 1
    assert 0.0 < prefill.load < 1.0
    assert (prefill.load, prefill.larger) == (prefill.measured, "measured")
    assert answer.pools["decode"].slo_s == 0.1
    assert answer.typical_prompt_tokens > 1


def test_a_request_that_waits_raises_it() -> None:
    with ApiServer() as server, server.client() as client:
        server.instance.paused = True
        asking = threading.Thread(target=lambda: httpx.post(f"{server.url}{TEXT}", json={"prompt": "say:a"}))
        asking.start()
        server.until(lambda: server.gateway.in_flight == 1)
        early, later = (SloResponse.model_validate(client.get("/debug/slo").json()) for _ in range(2))
        assert (early.waiting, later.waiting) == (1, 1)
        assert 0.0 < early.pools["prefill"].measured_s < later.pools["prefill"].measured_s
        server.instance.paused = False
        asking.join()


def test_metrics(client: httpx.Client) -> None:
    client.post(TEXT, json={"prompt": "say:abcdefgh"}).raise_for_status()
    lines = client.get("/metrics").text.splitlines()
    assert any(line.startswith('kllm:slo_load{model_name="tiny",pool="prefill"} ') for line in lines)
    assert any(line.startswith('kllm:instance_slo_load{engine="0",model_name="tiny",pool="decode"} ') for line in lines)


def test_it_needs_a_key_where_others_do() -> None:
    with ApiServer(api_key=["secret"]) as server, server.client() as client:
        assert client.get("/debug/slo").status_code == 401
        assert client.get("/debug/slo", headers={"Authorization": "Bearer secret"}).status_code == 200
