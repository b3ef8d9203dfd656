from __future__ import annotations

from kllm.server.protocol import ChatMessage
from kllm.tokenization.text_size import text_size

FAR = 1 << 30


def test_characters_and_values_count() -> None:
    assert text_size("abc", FAR) == 4
    assert text_size(["abc", 1, None, True], FAR) == 8
    assert text_size({"key": ["v"], "k": {}}, FAR) == 1 + 4 + 2 + 1 + 2 + 1
    assert text_size(({"a": ({"b": "c"},)}, "d"), FAR) == 1 + 1 + 2 + 1 + 1 + 2 + 2 + 2


def test_objects_count_by_their_attributes() -> None:
    texts = ["one", "other"]
    message = ChatMessage.model_validate(
        {"role": "user", "content": [{"type": "text", "text": text} for text in texts]}
    )
    assert text_size(message, FAR) >= sum(map(len, texts)) + len(ChatMessage.model_fields)


def test_more_than_the_limit_is_not_counted() -> None:
    class Endless(list[object]):
        def __iter__(self):  # type: ignore[no-untyped-def]
            read = 0
            while read < 1000:
                read += 1
                yield self
            raise AssertionError("read further than the limit")

    assert text_size(Endless(), 1000) == 1000
    assert text_size("a" * 5000, 1000) == 5001
    assert text_size(["a" * 5000] * 3, 1000) == 5002
