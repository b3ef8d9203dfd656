from __future__ import annotations

import json
import math
import random
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kllm.costs.errors import CostError
from kllm.costs.fitted import FitError, FittedStepTime, StepRecord, load_step_time, regime_of
from kllm.costs.fitting import MIN_RECORDS, fit_error, fit_step_time
from kllm.costs.hardware import THIS_MACHINE
from kllm.costs.layout import Layout
from kllm.costs.model_specs import SMOLLM2_135M
from kllm.costs.noise import NoisyStepTime, perturbed
from kllm.costs.roofline import RooflineModel
from kllm.costs.step import StepTimeModel, StepWork, step_work

KNOWN = FittedStepTime(
    "known",
    {
        "decode": {"step": 4e-3, "rows": 8e-4, "context": 4e-7},
        "prefill": {"step": 6e-3, "new_tokens": 5e-4, "attended": 3e-8, "sampled": 1e-3},
    },
    1e-4,
    {},
)


def steps(rng: random.Random, count: int) -> list[StepWork]:
    """What an engine plans: decode alone, and decode beside one or two chunks."""
    works = []
    for _ in range(count):
        rows = [(rng.randrange(50, 3000), 1, True) for _ in range(rng.randrange(1, 33))]
        if rng.random() < 0.4:
            rows = rows[: rng.randrange(len(rows) + 1)]
            rows += [
                (rng.choice([0, 0, 512]), rng.randrange(16, 512), rng.random() < 0.7) for _ in range(rng.choice([1, 2]))
            ]
        works.append(step_work(rows))
    return works


def record(model: StepTimeModel, works: list[StepWork], rng: random.Random, sigma: float) -> list[StepRecord]:
    source = NoisyStepTime(model, rng, sigma)
    return [StepRecord(work, source.draw(work)) for work in works]


def test_a_known_model_is_recovered_from_noisy_steps():
    rng = random.Random(5)
    fitted = fit_step_time(record(KNOWN, steps(rng, 1500), rng, 0.05), "known")
    for work in steps(random.Random(6), 200):
        assert fitted.seconds(work) == pytest.approx(KNOWN.seconds(work), rel=0.03)
    error = fitted.errors["all"]
    assert error.median == pytest.approx(0.6745 * 0.05, rel=0.15)
    assert error.p90 == pytest.approx(1.645 * 0.05, rel=0.15)
    assert error.sigma == pytest.approx(0.05, rel=0.1)
    assert abs(error.bias) < 0.005


def test_without_noise_it_is_exact():
    works = steps(random.Random(5), 300)
    fitted = fit_step_time(record(KNOWN, works, random.Random(0), 0.0), "known")
    assert fitted.errors["all"].p90 < 1e-6


def test_outliers_hardly_pull():
    rng = random.Random(5)
    records = record(KNOWN, steps(rng, 1500), rng, 0.03)
    disturbed = [StepRecord(r.work, r.seconds * 10) if rng.random() < 0.05 else r for r in records]
    fitted = fit_step_time(disturbed, "known")
    assert fit_error(fitted, records).median < 0.03
    assert abs(fit_error(fitted, records).bias) < 0.02
    assert fitted.errors["all"].bias < -0.2, "what outliers cost altogether is reported"


def test_an_unbiased_fit_adds_up_to_what_was_recorded():
    rng = random.Random(5)
    records = record(KNOWN, steps(rng, 600), rng, 0.05)
    disturbed = [StepRecord(r.work, r.seconds * 3) if rng.random() < 0.05 else r for r in records]
    fitted = fit_step_time(disturbed, "known")
    unbiased = fitted.unbiased()
    assert fitted.errors["all"].bias < -0.05
    for regime in ("decode", "prefill"):
        assert unbiased.errors[regime].bias == 0.0
        of_regime = [r for r in disturbed if regime_of(r.work) == regime]
        assert fit_error(unbiased, of_regime).bias == pytest.approx(0.0, abs=1e-9)
    assert unbiased.errors["all"].sigma == fitted.errors["all"].sigma


def test_a_roofline_is_fitted_within_a_few_percent():
    """Its kinks are not linear in the features; unseen steps of the same load must still come out well."""
    rng = random.Random(9)
    truth = perturbed(RooflineModel(THIS_MACHINE, SMOLLM2_135M, Layout()), rng, 0.2)
    fitted = fit_step_time(record(truth, steps(rng, 800), rng, 0.05), "this machine")
    error = fit_error(fitted, record(truth, steps(rng, 400), rng, 0.0))
    assert error.median < 0.03
    assert error.p90 < 0.08
    assert abs(error.bias) < 0.02


def test_a_regime_without_enough_records_is_fitted_to_all():
    rng = random.Random(5)
    works = [work for work in steps(rng, 400) if regime_of(work) == "decode"]
    fitted = fit_step_time(record(KNOWN, works, rng, 0.02), "known")
    assert set(fitted.errors) == {"decode", "all"}
    assert fitted.seconds(step_work([(0, 500, True)])) > fitted.seconds(step_work([(0, 100, True)])) > 0


@given(
    rows=st.lists(st.tuples(st.integers(0, 10**6), st.integers(1, 10**5), st.booleans()), max_size=5),
    seconds=st.lists(st.floats(1e-6, 1e3), min_size=MIN_RECORDS, max_size=MIN_RECORDS),
)
def test_predictions_are_above_0_whatever_was_recorded(rows, seconds):
    works = steps(random.Random(1), MIN_RECORDS)
    fitted = fit_step_time([StepRecord(*pair) for pair in zip(works, seconds, strict=True)], "anything")
    predicted = fitted.seconds(step_work(rows))
    assert math.isfinite(predicted)
    assert predicted >= fitted.floor_s > 0


def test_too_few_or_impossible_records_are_refused():
    works = steps(random.Random(1), MIN_RECORDS)
    records = [StepRecord(work, 1.0) for work in works]
    with pytest.raises(CostError, match="19 recorded steps are too few"):
        fit_step_time(records[1:], "x")
    for bad in (0.0, -1.0, math.nan, math.inf):
        with pytest.raises(CostError, match="record 3: seconds"):
            fit_step_time([*records[:3], StepRecord(works[0], bad), *records[3:]], "x")


def test_saved_and_loaded_it_is_the_same(tmp_path: Path):
    rng = random.Random(5)
    fitted = fit_step_time(record(KNOWN, steps(rng, 100), rng, 0.05), "2 cores, Zen 4")
    fitted.save(tmp_path / "fit.json")
    loaded = load_step_time(tmp_path / "fit.json")
    assert loaded == fitted
    assert loaded.hardware == "2 cores, Zen 4"
    assert isinstance(loaded.errors["all"], FitError)
    for work in steps(rng, 20):
        assert loaded.seconds(work) == fitted.seconds(work)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": "other"}, "format"),
        ({"version": 99}, "version: 99"),
        ({"hardware": 3}, "hardware: missing, or not of type str"),
        ({"floor_s": 0}, "floor_s must be above 0"),
        ({"floor_s": True}, "floor_s: missing, or not of type float"),
        ({"coefficients": None}, "coefficients: missing"),
        ({"coefficients": {"decode": {}}}, "one set for each of decode, prefill"),
        (
            {"coefficients": {"decode": {"magic": 1}, "prefill": {}}},
            "coefficients.decode: no feature is called 'magic'",
        ),
        (
            {"coefficients": {"decode": {"rows": -1}, "prefill": {}}},
            "coefficients.decode.rows: not a number of at least",
        ),
        ({"coefficients": {"decode": {"rows": "1"}, "prefill": {}}}, "rows: missing, or not of type float"),
        ({"coefficients": {"decode": [], "prefill": {}}}, "coefficients.decode: missing, or not of type dict"),
        ({"errors": {"all": {"nonsense": 1}}}, "records: missing, or not of type int"),
        ({"errors": {"all": 5}}, "errors.all: missing, or not of type dict"),
    ],
)
def test_broken_files_are_refused_with_file_and_field(tmp_path: Path, change, message):
    path = tmp_path / "fit.json"
    KNOWN.save(path)
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(CostError) as caught:
        load_step_time(path)
    assert str(caught.value).startswith(f"{path}: ")
    assert message in str(caught.value)


def test_a_file_that_is_not_json_is_refused(tmp_path: Path):
    path = tmp_path / "fit.json"
    path.write_bytes(b"\xff{")
    with pytest.raises(CostError, match="not JSON"):
        load_step_time(path)
