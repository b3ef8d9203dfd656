"""Server-sent events: how a JSON body becomes one, whatever the client splits lines at."""

from __future__ import annotations

import msgspec

DONE = b"data: [DONE]\n\n"

_encode = msgspec.json.encode
# Line ends to Python's str.splitlines, which clients use, but not to JSON: encoders leave them as they are.
_LINE_ENDS = ((b"\xc2\x85", b"\\u0085"), (b"\xe2\x80\xa8", b"\\u2028"), (b"\xe2\x80\xa9", b"\\u2029"))


def sse_event(body: object) -> bytes:
    """`data: …` with the body as JSON on one line."""
    data = _encode(body)
    if not data.isascii():
        for character, escaped in _LINE_ENDS:
            data = data.replace(character, escaped)
    return b"data: " + data + b"\n\n"
