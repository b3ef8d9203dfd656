from __future__ import annotations

import io
import logging
from collections.abc import Iterator

import pytest

from kllm.telemetry.logs import configure_logs, fields


@pytest.fixture
def stream() -> Iterator[io.StringIO]:
    """What the root logger prints while a test runs."""
    root = logging.getLogger()
    before = root.handlers[:], root.level
    text = io.StringIO()
    configure_logs("info", text)
    yield text
    root.handlers[:], level = before
    root.setLevel(level)


def test_line(stream: io.StringIO) -> None:
    logging.getLogger("kllm.x").info("hello there", extra=fields(request_id="r-1", ms=1.25, nothing=None))
    logging.getLogger("kllm.x").debug("not shown")
    stamp, rest = stream.getvalue().split(" ", 1)
    assert stamp.endswith("Z")
    assert rest == 'info kllm.x msg="hello there" request_id=r-1 ms=1.25\n'


def test_input_cannot_forge_a_line(stream: io.StringIO) -> None:
    logging.getLogger("kllm.x").info("a\nb", extra=fields(path='x" status=200\r\n\ud800'))
    assert stream.getvalue().count("\n") == 1
    assert 'msg="a\\nb" path="x\\" status=200\\r\\n?"' in stream.getvalue()


def test_exception_stays_on_its_line(stream: io.StringIO) -> None:
    try:
        raise ValueError("no")
    except ValueError:
        logging.getLogger("kllm.x").exception("failed")
    assert stream.getvalue().count("\n") == 1
    assert "ValueError: no" in stream.getvalue()
