"""How much text a JSON-like value holds: what templates, tokenising and encoding it cost."""

from __future__ import annotations

from itertools import islice


def text_size(value: object, limit: int) -> int:
    """Characters, and one for every value, in lists, dicts and the attributes of objects. It is not counted much
    further than `limit`: from there on the answer says only that the value is that large, and costs no more."""
    size, waiting = 0, [value]
    while waiting and size < limit:
        item = waiting.pop()
        size += 1
        if isinstance(item, str):
            size += len(item)
        elif isinstance(item, dict):
            waiting.extend(islice(item, limit))
            waiting.extend(islice(item.values(), limit))
        elif isinstance(item, (list, tuple)):
            waiting.extend(islice(item, limit))
        elif item is not None and hasattr(item, "__dict__"):
            waiting.extend(vars(item).values())
    return size
