"""Operators by name."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Literal

from kllm.kernels import cpu
from kllm.kernels.invariant import InvariantOperators
from kllm.kernels.operators import Operators
from kllm.kernels.reference import ReferenceOperators

NAMES = ("cpu", "reference", "invariant")

SPIN_US = 200  # an idle thread looks for work this long before it parks: longer than between two regions of a step

_log = logging.getLogger(__name__)


def use_machine(threads: int, instruction_set: str = "auto", cpus: Sequence[int] = ()) -> None:
    """Threads and instructions of the cpu operators, for the whole process. cpus: cores to bind the threads to; the
    first is for the thread that runs the model. Raises ValueError for an instruction set the processor lacks."""
    from kllm.kernels.cpu import _native

    _native.keep_freed_memory()
    _native.use_instruction_set(_native.instruction_sets()[0] if instruction_set == "auto" else instruction_set)
    if _native.threads() != threads or cpus:
        _native.use_threads(threads, SPIN_US, cpus)


def get_operators(name: str = "auto", activations: Literal["auto", "int8", "float"] = "auto") -> Operators:
    """auto: the fastest on this machine. activations: what quantised weights are multiplied with.
    Raises ValueError for a name it does not know and for operators that cannot run here."""
    missing = cpu.why_not() if name in ("auto", "cpu") else None
    if name == "cpu" and missing:
        raise ValueError(f"cpu operators cannot be used: {missing}")
    if name == "auto" and missing:
        _log.warning("using the slower reference operators: %s", missing)
    if name == "cpu" or (name == "auto" and not missing):
        from kllm.kernels.cpu.operators import CpuOperators

        return CpuOperators(int8_products=activations != "float")
    if activations == "int8":
        raise ValueError("int8 activations need the cpu operators")
    if name == "invariant":
        return InvariantOperators()
    if name in ("auto", "reference"):
        return ReferenceOperators()
    raise ValueError(f"unknown operators {name!r}: choose from auto, {', '.join(NAMES)}")
