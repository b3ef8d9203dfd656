"""Server-sent events stay on one line for every way in which clients split lines."""

from __future__ import annotations

import json
import sys

import pytest

from kllm.server.events import sse_event

LINE_ENDS = [chr(code) for code in range(sys.maxunicode + 1) if len(f"a{chr(code)}b".splitlines()) > 1]


@pytest.mark.parametrize("character", LINE_ENDS, ids=[f"U+{ord(character):04X}" for character in LINE_ENDS])
def test_a_text_with_a_line_end_is_one_line(character: str) -> None:
    body = {"text": f"é{character}{character}ü"}
    line, *rest = sse_event(body).decode().splitlines()
    assert rest == [""]
    assert json.loads(line.removeprefix("data: ")) == body


def test_other_characters_are_left_as_they_are() -> None:
    assert sse_event({"text": "é – 字 \U0001f600"}) == 'data: {"text":"é – 字 \U0001f600"}\n\n'.encode()
