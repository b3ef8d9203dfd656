"""Everything around completions: models, tokens, keys, ids, readiness, limits, metrics, clients that leave."""

from __future__ import annotations

import json
import threading

import httpx
import pytest
from support.api_server import ApiServer

from kllm.server.responses import CacheClearedResponse, LoadResponse, ModelList, TokenizeResponse

TEXT = "/v1/completions"


def test_models(client: httpx.Client) -> None:
    reply = client.get("/v1/models").json()
    [card] = ModelList.model_validate(reply).data
    assert (card.id, card.max_model_len, card.owned_by, card.parent) == ("tiny", 512, "kllm", None)
    assert client.get("/v1/models/tiny").json() == reply["data"][0]


def test_tokenize_and_back(client: httpx.Client, server: ApiServer) -> None:
    reply = TokenizeResponse.model_validate(
        client.post("/tokenize", json={"prompt": " a€", "return_token_strs": True}).json()
    )
    assert reply.tokens == server.tokenizer.encode(" a€")
    assert (reply.count, reply.max_model_len) == (len(reply.tokens), 512)
    assert reply.token_strs is not None
    assert reply.token_strs[0] == "Ġa"
    assert client.post("/detokenize", json={"tokens": reply.tokens}).json() == {"prompt": " a€"}
    chat = client.post("/tokenize", json={"messages": [{"role": "user", "content": "hi"}]}).json()
    assert server.tokenizer.decode(chat["tokens"], False) == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"


def test_status(client: httpx.Client) -> None:
    assert client.get("/health").json() == {"status": "ok"}
    assert client.get("/ready").json() == {"status": "ready"}
    assert client.get("/version").json()["version"]
    LoadResponse.model_validate(client.get("/load").json())


@pytest.mark.parametrize("given", ["abc-1", "a" * 128, "user@host:1/2"])
def test_request_id_is_echoed(client: httpx.Client, given: str) -> None:
    assert client.get("/health", headers={"X-Request-Id": given}).headers["x-request-id"] == given
    reply = client.post(TEXT, json={"prompt": "say:a"}, headers={"X-Request-Id": given})
    assert reply.json()["id"] == f"cmpl-{given}"


@pytest.mark.parametrize("given", ["", "a b", "a" * 129, "a\tb", "<script>"])
def test_unusable_request_id_is_replaced(client: httpx.Client, given: str) -> None:
    assert client.get("/health", headers={"X-Request-Id": given}).headers["x-request-id"] not in ("", given)


def test_same_request_id_twice_at_once(server: ApiServer) -> None:
    answers = []

    def ask() -> None:
        with server.client() as client:
            answers.append(client.post(TEXT, json={"prompt": "say:abcdefgh", "request_id": "twin"}).status_code)

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == [200] * 4


def test_api_keys() -> None:
    with ApiServer(api_key=["first", "sécond"]) as server, server.client() as client:
        for key in ("", "Bearer", "Bearer wrong", "Bearer firs", "Basic first", "first", "Bearer first second"):
            response = client.get("/v1/models", headers={"Authorization": key})
            assert (response.status_code, response.json()["error"]["code"]) == (401, "invalid_api_key")
            assert response.headers["www-authenticate"] == "Bearer"
        assert client.get("/v1/models").status_code == 401
        assert client.post(TEXT, content=b"not even JSON").status_code == 401
        for path in ("/load", "/v1/models/tiny"):
            assert client.get(path).status_code == 401
        for path in ("/tokenize", "/detokenize", "/v1/chat/completions", "/reset_prefix_cache", "/flush_cache"):
            assert client.post(path, json={}).status_code == 401
        for path in ("/health", "/ready", "/version", "/metrics", "/openapi.json"):
            assert client.get(path).status_code == 200
        for key in ("Bearer first", "bearer first", "Bearer sécond".encode()):
            assert client.get("/v1/models", headers={"Authorization": key}).status_code == 200


def status(server: ApiServer, key: str, path: str, method: str = "GET") -> int:
    with server.client() as client:
        return client.request(method, path, headers={"Authorization": f"Bearer {key}"}).status_code


OPERATORS = (("GET", "/debug/routing"), ("GET", "/debug/slo"), ("GET", "/debug/fleet"), ("POST", "/flush_cache"))


@pytest.mark.parametrize(("method", "path"), OPERATORS)
def test_what_is_for_operators(method: str, path: str) -> None:
    """Clients that are separate must not learn of each other, nor clear what is another's."""
    with ApiServer(api_key=["first", "second"]) as server:
        assert status(server, "first", path, method) == 403
        assert status(server, "third", path, method) == 401
    with ApiServer(api_key=["first", "second"], admin_api_key=["boss"]) as server:
        assert status(server, "boss", path, method) == 200
        assert status(server, "first", path, method) == 403
        assert status(server, "third", path, method) == 401
        assert status(server, "boss", "/v1/models") == 401, "an operator is no client"
    with ApiServer(api_key=["first"]) as server:
        assert status(server, "first", path, method) == 200
    with ApiServer(api_key=["first", "second"], share_cache_between_keys=True) as server:
        assert status(server, "second", path, method) == 200


def salts(keys: list[str], *callers: str, salt: str | None = None, **options: object) -> list[str]:
    """The cache salts of requests that come with these keys."""
    body = {"prompt": "say:same", "cache_salt": salt}
    with ApiServer(api_key=keys, **options) as server, server.client() as client:
        for key in callers:
            assert client.post(TEXT, json=body, headers={"Authorization": f"Bearer {key}"}).status_code == 200
        return [request.cache_salt for request in server.instance.submits]


@pytest.mark.parametrize("salt", [None, "mine"])
def test_keys_do_not_share_cached_prefixes(salt: str | None) -> None:
    one, again, other = salts(["first", "second"], "first", "first", "second", salt=salt)
    assert one == again != other
    assert "first" not in one
    assert one not in salts(["first", "second"], "first", "second", salt="yours")


def test_a_salt_cannot_imitate_another_key() -> None:
    [first] = salts(["first", "second"], "first")
    for imitated in (first, f"\0{first}", f"{first}\0"):
        assert first not in salts(["first", "second"], "second", salt=imitated)


def test_one_key_or_the_wish_to_share_needs_no_salts() -> None:
    assert salts(["only"], "only") == salts(["only", "only"], "only") == [""]
    assert salts(["first", "second"], "first", "second", share_cache_between_keys=True) == ["", ""]
    assert salts(["first", "second"], "second", salt="mine", share_cache_between_keys=True) == ["mine"]


def test_clearing_the_cache() -> None:
    nothing_left = {"complete": True, "instances": [{"instance": 0, "complete": True, "error": None}]}
    with ApiServer() as server, server.client() as client:
        for path in (
            "/reset_prefix_cache",
            "/flush_cache",
            "/reset_prefix_cache?reset_external=false&reset_running_requests=0",
            "/reset_prefix_cache?reset_external=true",
            "/reset_prefix_cache?reset_external=True",
        ):
            response = client.post(path)
            assert (response.status_code, response.json()) == (200, nothing_left)
            CacheClearedResponse.model_validate(response.json())
        assert server.instance.clears == [False, False, False, True, True]
        for query, param in (
            ("reset_external=maybe", "reset_external"),
            ("reset_extrenal=true", "reset_extrenal"),
            ("reset_running_requests=true", "reset_running_requests"),
        ):
            refused = client.post(f"/reset_prefix_cache?{query}")
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)
        assert client.post("/flush_cache?reset_external=true").status_code == 400
        assert client.get("/flush_cache").status_code == 405
        assert len(server.instance.clears) == 5


def test_clearing_says_when_something_is_left() -> None:
    with ApiServer() as server, server.client() as client:
        server.instance.paused = True
        running = threading.Thread(target=lambda: client.post(TEXT, json={"prompt": "say:abc"}))
        running.start()
        server.until(lambda: len(server.instance.running) == 1)
        with server.client() as other:
            reply = other.post("/flush_cache").json()
        assert reply == {"complete": False, "instances": [{"instance": 0, "complete": False, "error": None}]}
        server.instance.paused = False
        running.join()


def test_before_the_instance_is_ready() -> None:
    with ApiServer(start=False) as server, server.client() as client:
        assert client.get("/health").status_code == 200
        posts = (TEXT, "/tokenize", "/flush_cache")
        for method, path in (("GET", "/ready"), ("GET", "/v1/models"), *(("POST", path) for path in posts)):
            response = client.request(method, path, json={"prompt": "a"} if method == "POST" else None)
            assert (response.status_code, response.json()["error"]["code"]) == (503, "not_ready")
            assert int(response.headers["retry-after"]) > 0
        assert client.get("/metrics").status_code == 200


def test_draining_refuses_new_requests_and_finishes_old_ones() -> None:
    with ApiServer() as server, server.client() as client:
        server.instance.paused = True
        answers: list[httpx.Response] = []
        running = threading.Thread(target=lambda: answers.append(client.post(TEXT, json={"prompt": "say:abc"})))
        running.start()
        server.until(lambda: server.gateway.in_flight == 1)
        server.app.state.service.draining = True
        with server.client() as other:
            assert other.get("/ready").status_code == 503
            refused = other.post(TEXT, json={"prompt": "a"})
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "shutting_down")
        server.instance.paused = False
        server.call(server.gateway.drain(20))
        running.join()
        assert answers[0].json()["choices"][0]["text"] == "abc"


def test_drain_that_takes_too_long_ends_streams_with_an_error() -> None:
    with ApiServer() as server, server.client() as client:
        with client.stream("POST", TEXT, json={"prompt": "say:forever", "stream": True, "max_tokens": 500}) as response:
            lines = response.iter_lines()
            next(lines)
            server.instance.paused = True
            server.call(server.gateway.drain(0))
            rest = [line for line in lines if line]
        assert json.loads(rest[-2][6:])["error"]["code"] == "shutting_down"
        assert rest[-1] == "data: [DONE]"


def test_full_queue() -> None:
    with ApiServer(max_queue=1) as server, server.client() as client:
        server.instance.paused = True
        with server.client() as other:
            first = threading.Thread(target=lambda: other.post(TEXT, json={"prompt": "say:abc"}))
            first.start()
            server.until(lambda: server.gateway.in_flight == 1)
            for stream in (False, True):
                response = client.post(TEXT, json={"prompt": "a", "stream": stream})
                assert (response.status_code, response.json()["error"]["code"]) == (429, "rate_limit_exceeded")
                assert int(response.headers["retry-after"]) > 0
            server.instance.paused = False
            first.join()
        assert client.post(TEXT, json={"prompt": "say:a"}).status_code == 200
        # All outputs of a request are taken, or none.
        assert client.post(TEXT, json={"prompt": "say:a", "n": 2}).status_code == 400
        assert server.gateway.in_flight == 0


@pytest.mark.parametrize(("stream", "n"), [(False, 1), (True, 1), (False, 3), (True, 3)])
def test_client_that_leaves_frees_its_work(stream: bool, n: int) -> None:
    with ApiServer() as server:
        client = server.client()
        body = {"prompt": "say:forever", "max_tokens": 500, "stream": stream, "n": n}
        server.instance.paused = not stream
        if stream:
            response = client.send(client.build_request("POST", TEXT, json=body), stream=True)
            next(response.iter_lines())
            server.instance.paused = True
        else:
            sending = threading.Thread(target=_post_and_be_cut, args=(client, body))
            sending.start()
            server.until(lambda: server.gateway.in_flight == n)
        _cut(client)
        server.until(lambda: len(server.instance.aborts) == n)
        assert set(server.instance.aborts) == {request.request_id for request in server.instance.submits}
        assert server.gateway.in_flight == 0
        if not stream:
            sending.join()
        with server.client() as other:
            text = other.get("/metrics").text
        assert f'kllm:request_success_total{{engine="0",finished_reason="abort",model_name="tiny"}} {n}.0' in text


def _post_and_be_cut(client: httpx.Client, body: dict[str, object]) -> None:
    with pytest.raises(httpx.TransportError):
        client.post(TEXT, json=body)


def _cut(client: httpx.Client) -> None:
    """Close the client's connections under it, as a process that dies does."""
    import socket

    for connection in client._transport._pool.connections:  # type: ignore[attr-defined]
        stream = connection._connection._network_stream
        stream.get_extra_info("socket").shutdown(socket.SHUT_RDWR)


def test_metrics() -> None:
    with ApiServer(vllm_metrics=True) as server, server.client() as client:
        client.post(TEXT, json={"prompt": "say:abc"})
        response = client.get("/metrics")
        assert response.headers["content-type"].startswith("text/plain")
        labels = 'engine="0",model_name="tiny"'
        for prefix in ("kllm:", "vllm:"):
            for line in (
                f"prompt_tokens_total{{{labels}}} 7.0",
                f"generation_tokens_total{{{labels}}} 4.0",
                'request_success_total{engine="0",finished_reason="stop",model_name="tiny"} 1.0',
                f"time_to_first_token_seconds_count{{{labels}}} 1.0",
                f"inter_token_latency_seconds_count{{{labels}}} 3.0",
                f"request_queue_time_seconds_sum{{{labels}}} 0.01",
                f"request_prefill_time_seconds_sum{{{labels}}} 0.02",
                f"prefix_cache_hits_total{{{labels}}} 4.0",
                f"instance_restarts_total{{{labels}}} 0.0",
            ):
                assert f"\n{prefix}{line}" in response.text


def test_outputs_that_do_not_fit_together_are_refused_before_any_is_begun() -> None:
    with ApiServer(max_queue=4) as server, server.client() as client:
        response = client.post(TEXT, json={"prompt": "say:abc", "n": 5})
        assert (response.status_code, response.json()["error"]["param"]) == (400, "n")
        assert "4 is the most" in response.json()["error"]["message"]
        assert server.instance.submits == []
        server.instance.paused = True
        with server.client() as other:
            first = threading.Thread(target=lambda: other.post(TEXT, json={"prompt": "say:abc"}))
            first.start()
            server.until(lambda: server.gateway.in_flight == 1)
            response = client.post(TEXT, json={"prompt": "say:abc", "n": 4})
            assert response.status_code == 429
            assert int(response.headers["retry-after"]) >= 1
            assert len(server.instance.submits) == 1
            server.instance.paused = False
            first.join()
