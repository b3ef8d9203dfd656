from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest
from support.api_server import ApiServer


@pytest.fixture(scope="session")
def server() -> Iterator[ApiServer]:
    """One server for tests that leave no trace in it."""
    with ApiServer() as running:
        yield running


@pytest.fixture
def client(server: ApiServer) -> Iterator[httpx.Client]:
    with server.client() as http:
        yield http
