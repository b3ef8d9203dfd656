"""/openapi.json against a running server: whatever schemathesis sends is answered as documented, never with a 5xx."""

from __future__ import annotations

from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    negative_data_rejection,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)
from support.live_server import LiveServer

CHECKS: Any = [
    not_a_server_error,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
    negative_data_rejection,
]
POSTS = ("/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize")
GETS = ("/v1/models", "/v1/models/{model}", "/health", "/ready", "/version", "/metrics", "/load")
FLUSHES = ("/reset_prefix_cache", "/flush_cache")
GOOD, BAD = schemathesis.GenerationMode.POSITIVE, schemathesis.GenerationMode.NEGATIVE
MANY = 500


@pytest.fixture(scope="module")
def schema(live_server: LiveServer) -> Any:
    # A string that is too long can make the whole body too large: 413 refuses it as well as the usual 400.
    refusals = {"expected-statuses": ["400", "401", "404", "413", "422", "429"]}
    config = schemathesis.Config.from_dict({"checks": {"negative_data_rejection": refusals}})
    return schemathesis.openapi.from_url(f"{live_server.url}/openapi.json", config=config)


def explore(server: LiveServer, schema: Any, path: str, mode: schemathesis.GenerationMode, examples: int) -> None:
    [method] = schema[path]

    @settings(
        max_examples=examples,
        deadline=None,
        derandomize=True,
        database=None,
        phases=[Phase.explicit, Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(schema[path][method].as_strategy(generation_mode=mode))
    def answers_as_documented(case: schemathesis.Case) -> None:
        if mode is GOOD and "completions" in path:
            case.body.setdefault("max_tokens", 8)  # else a chat goes on until the model's context is full
        response = case.call(headers=server.headers, timeout=300)
        case.validate_response(response, checks=CHECKS)

    answers_as_documented()
    server.wait_idle()
    assert "Traceback" not in server.log


@pytest.mark.parametrize("mode", [GOOD, BAD], ids=["valid", "invalid"])
@pytest.mark.parametrize("path", POSTS)
def test_bodies(live_server: LiveServer, schema: Any, path: str, mode: schemathesis.GenerationMode) -> None:
    explore(live_server, schema, path, mode, 60)


@pytest.mark.parametrize("path", [*GETS, *FLUSHES])
def test_without_a_body(live_server: LiveServer, schema: Any, path: str) -> None:
    explore(live_server, schema, path, GOOD, 10)


@pytest.mark.slow
@pytest.mark.parametrize("mode", [GOOD, BAD], ids=["valid", "invalid"])
@pytest.mark.parametrize("path", POSTS)
def test_many_bodies(live_server: LiveServer, schema: Any, path: str, mode: schemathesis.GenerationMode) -> None:
    explore(live_server, schema, path, mode, MANY)
