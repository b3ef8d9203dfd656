"""Operators by name."""

from __future__ import annotations

from kllm.kernels.invariant import InvariantOperators
from kllm.kernels.operators import Operators
from kllm.kernels.reference import ReferenceOperators

_CLASSES: dict[str, type[Operators]] = {cls.name: cls for cls in (ReferenceOperators, InvariantOperators)}


def get_operators(name: str = "auto") -> Operators:
    """auto: the fastest on this machine. Raises ValueError for a name that it does not know."""
    cls = ReferenceOperators if name == "auto" else _CLASSES.get(name)
    if cls is None:
        raise ValueError(f"unknown operators {name!r}: choose from auto, {', '.join(_CLASSES)}")
    return cls()
