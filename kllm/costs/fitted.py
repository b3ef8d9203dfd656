"""FittedStepTime: a step-time model whose coefficients were fitted to recorded steps (see fitting.py).

    seconds = Σ coefficient · feature,  coefficients ≥ 0, features of StepWork that grow with it

Steps that only decode run other kernels than steps with prefill, and are priced by coefficients of their own. A feature
min(rows, 4) lets the first rows cost more than later ones (engines work on rows in tiles), max(rows - 8, 0) less (as
long as reading the weights takes longer than multiplying with them).
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from kllm.costs.errors import CostError
from kllm.costs.step import StepWork

_FORMAT = "kllm-step-times"
_VERSION = 1
_ERROR_FIGURES = ("median", "p90", "bias", "sigma")


@dataclass(frozen=True)
class StepRecord:
    """One step of a real engine: what it computed, and the seconds it took."""

    work: StepWork
    seconds: float


@dataclass(frozen=True)
class FitError:
    """How far predictions are from the records they were fitted to.

    median, p90: of |predicted / recorded - 1|. bias: Σ predicted / Σ recorded - 1, outliers included.
    sigma: of the logarithm of recorded / predicted, by its quartiles; the noise of a step for NoisyStepTime.
    """

    records: int
    median: float
    p90: float
    bias: float
    sigma: float


Feature = Callable[[StepWork], float]

FEATURES: dict[str, Feature] = {
    "step": lambda work: 1.0,
    "rows": lambda work: work.rows,
    "rows_to_4": lambda work: min(work.rows, 4),
    "rows_to_16": lambda work: min(work.rows, 16),
    "rows_above_8": lambda work: max(work.rows - 8, 0),
    "new_tokens": lambda work: work.new_tokens,
    "new_tokens_to_64": lambda work: min(work.new_tokens, 64),
    "sampled": lambda work: work.sampled,
    "context": lambda work: work.context,
    "attended": lambda work: work.attended,
    "selected": lambda work: work.selected,
}
# Each row of a decode step computes one token, so tokens = rows and attended = context there. `attended` is quadratic
# in the tokens of a chunk. `selected` tells nothing unless attention is sparse, and then gets its coefficient.
REGIME_FEATURES = {
    "decode": ("step", "rows", "rows_to_4", "rows_to_16", "rows_above_8", "context", "selected"),
    "prefill": ("step", "rows", "new_tokens", "new_tokens_to_64", "sampled", "context", "attended", "selected"),
}


def regime_of(work: StepWork) -> str:
    """ "decode" if every row computes one token, else "prefill"."""
    return "decode" if work.new_tokens <= work.rows else "prefill"


@dataclass(frozen=True)
class FittedStepTime:
    """Implements StepTimeModel. coefficients: by regime and feature, in seconds. floor_s: never predicts less.

    hardware: what it was recorded on, in words. errors: by regime, and "all".
    """

    hardware: str
    coefficients: Mapping[str, Mapping[str, float]]
    floor_s: float
    errors: Mapping[str, FitError]
    _terms: dict[str, list[tuple[Feature, float]]] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not (math.isfinite(self.floor_s) and self.floor_s > 0):
            raise ValueError(f"floor_s must be above 0: {self.floor_s}")
        if self.coefficients.keys() != REGIME_FEATURES.keys():
            raise ValueError(f"coefficients: one set for each of {', '.join(REGIME_FEATURES)} is needed")
        for regime, values in self.coefficients.items():
            for name, value in values.items():
                if name not in FEATURES:
                    raise ValueError(f"coefficients.{regime}: no feature is called {name!r}")
                if not (math.isfinite(value) and value >= 0):
                    raise ValueError(f"coefficients.{regime}.{name}: not a number of at least 0: {value}")
        terms = {
            regime: [(FEATURES[name], value) for name, value in values.items() if value > 0]
            for regime, values in self.coefficients.items()
        }
        object.__setattr__(self, "_terms", terms)  # the class is frozen

    def seconds(self, work: StepWork) -> float:
        """Seconds that the step takes, at least `floor_s`."""
        total = 0.0
        for feature, coefficient in self._terms[regime_of(work)]:
            total += coefficient * feature(work)
        return max(total, self.floor_s)

    def unbiased(self) -> FittedStepTime:
        """The same, with each regime scaled so that its records' predictions add up to what was recorded.

        A robust fit follows typical steps; a simulation that adds up steps has to follow their mean. `errors` stay
        those of the fit, but for their bias.
        """
        factors = {
            regime: 1.0 / (1.0 + self.errors[regime].bias) if regime in self.errors else 1.0
            for regime in self.coefficients
        }
        return replace(
            self,
            coefficients={
                regime: {name: value * factors[regime] for name, value in values.items()}
                for regime, values in self.coefficients.items()
            },
            errors={name: replace(error, bias=0.0) for name, error in self.errors.items()},
        )

    def save(self, path: Path) -> None:
        """As JSON. Raises OSError."""
        content = {
            "format": _FORMAT,
            "version": _VERSION,
            "hardware": self.hardware,
            "floor_s": self.floor_s,
            "coefficients": {regime: dict(values) for regime, values in self.coefficients.items()},
            "errors": {name: asdict(error) for name, error in self.errors.items()},
        }
        path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def load_step_time(path: Path) -> FittedStepTime:
    """What `FittedStepTime.save` wrote. Raises OSError, or CostError naming file and field."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise CostError(f"{path}: not JSON: {error}") from error
    if not isinstance(content, dict) or content.get("format") != _FORMAT:
        raise CostError(f"{path}: format: not {_FORMAT}")
    if content.get("version") != _VERSION:
        raise CostError(f"{path}: version: {content.get('version')!r} is not known, {_VERSION} is")
    try:
        return FittedStepTime(
            hardware=_typed(content, "hardware", str),
            coefficients={
                regime: {name: _typed(values, name, float) for name in values}
                for regime, values in _typed_each(content, "coefficients", dict)
            },
            floor_s=_typed(content, "floor_s", float),
            errors={
                name: FitError(_typed(error, "records", int), *(_typed(error, key, float) for key in _ERROR_FIGURES))
                for name, error in _typed_each(content, "errors", dict)
            },
        )
    except ValueError as error:
        raise CostError(f"{path}: {error}") from error


def _typed_each(content: dict[str, Any], name: str, kind: type) -> Iterator[tuple[str, Any]]:
    """Items of the dictionary content[name], each of this type. Raises ValueError."""
    parts = _typed(content, name, dict)
    for key in parts:
        try:
            yield key, _typed(parts, key, kind)
        except ValueError as error:
            raise ValueError(f"{name}.{error}") from error


def _typed(content: dict[str, Any], name: str, kind: type) -> Any:
    """content[name] of this type; whole numbers are floats too. Raises ValueError."""
    value = content.get(name)
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    if not isinstance(value, kind):
        raise ValueError(f"{name}: missing, or not of type {kind.__name__}")
    return value
