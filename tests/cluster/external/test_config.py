"""Entries [[external]]: what is taken, and what is refused with the name of the field."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from kllm.cluster.external.config import ExternalEngine
from kllm.cluster.external.launcher import ExternalLauncher


@pytest.mark.parametrize(
    ("given", "url"),
    [
        ("http://127.0.0.1:8001", "http://127.0.0.1:8001"),
        ("http://127.0.0.1:8001/", "http://127.0.0.1:8001"),
        ("https://engine.example/v1", "https://engine.example"),
        ("http://[::1]:8001/one/v1/", "http://[::1]:8001/one"),
    ],
)
def test_addresses(given: str, url: str) -> None:
    assert ExternalEngine(url=given).url == url


@pytest.mark.parametrize(
    "url",
    [
        "127.0.0.1:8001",
        "ftp://host/",
        "http://",
        "http://u:p@host",
        "http://host:99999",
        "http://host/?a=b",
        "file:///x",
    ],
)
def test_addresses_that_are_refused(url: str) -> None:
    with pytest.raises(ValidationError, match="url"):
        ExternalEngine(url=url)


@pytest.mark.parametrize(
    "endpoint", ["http://127.0.0.1:5557", "tcp://*:5557", "tcp://", "5557", "inproc://x", "tcp://host", "tcp://host:x"]
)
def test_endpoints_that_nobody_can_connect_to(endpoint: str) -> None:
    with pytest.raises(ValidationError, match="kv_events"):
        ExternalEngine(url="http://127.0.0.1:8001", kv_events=endpoint)


@pytest.mark.parametrize("endpoint", ["tcp://host:5557", "tcp://[::1]:5557", "ipc:///run/events"])
def test_endpoints(endpoint: str) -> None:
    assert ExternalEngine(url="http://127.0.0.1:8001", kv_events=endpoint, replay=endpoint).replay == endpoint


def test_unknown_fields_are_errors() -> None:
    with pytest.raises(ValidationError, match="api_key"):
        ExternalEngine.model_validate({"url": "http://127.0.0.1:8001", "api_key": "secret"})


def test_the_key_must_be_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SOME_KEY", raising=False)
    config = ExternalEngine(url="http://127.0.0.1:8001", api_key_env="SOME_KEY")
    with pytest.raises(ValueError, match="SOME_KEY is not set"):
        ExternalLauncher(config)
    monkeypatch.setenv("SOME_KEY", "secret")
    ExternalLauncher(config)
