"""/openapi.json tells the truth: what schemathesis makes of it is answered with documented statuses and shapes."""

from __future__ import annotations

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)
from support.api_server import ApiServer

CHECKS = [not_a_server_error, content_type_conformance, response_schema_conformance, status_code_conformance]
OPERATIONS = {
    "/v1/chat/completions", "/v1/completions", "/v1/models", "/v1/models/{model}", "/tokenize", "/detokenize",
    "/health", "/ready", "/version", "/metrics", "/load",
    "/debug/fleet", "/debug/fleet/role", "/pd_role_switch",
    "/reset_prefix_cache", "/flush_cache", "/debug/routing", "/debug/slo",
}  # fmt: skip


TAKE_NOTHING = {
    path
    for path in OPERATIONS
    if path.startswith(("/v1/models", "/health", "/ready", "/ver", "/met", "/load", "/flush"))
    or path in ("/debug/routing", "/debug/slo", "/debug/fleet")
}
GOOD, BAD = schemathesis.GenerationMode.POSITIVE, schemathesis.GenerationMode.NEGATIVE


@pytest.mark.parametrize(
    ("path", "mode"),
    [(path, GOOD) for path in sorted(OPERATIONS)] + [(path, BAD) for path in sorted(OPERATIONS - TAKE_NOTHING)],
)
def test_operation(server: ApiServer, path: str, mode: schemathesis.GenerationMode) -> None:
    schema = schemathesis.openapi.from_url(f"{server.url}/openapi.json")
    for method in schema[path]:
        cases = schema[path][method].as_strategy(generation_mode=mode)

        @settings(
            max_examples=20,
            deadline=None,
            derandomize=True,
            database=None,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        @given(cases)
        def answers_as_documented(case: schemathesis.Case) -> None:
            case.call_and_validate(checks=CHECKS)

        answers_as_documented()


def test_all_operations_are_described(client: httpx.Client) -> None:
    document = client.get("/openapi.json").json()
    assert set(document["paths"]) == OPERATIONS
    for path, operations in document["paths"].items():
        for operation in operations.values():
            assert "422" not in operation["responses"], path
            for status, response in operation["responses"].items():
                if status != "200":
                    assert response["content"]["application/json"]["schema"]["$ref"].endswith("/ErrorResponse")
