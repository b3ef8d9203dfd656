"""What tokens are drawn from, held against the definition written out row by row in float64."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from kllm.engine.sampler.draws import uniform
from kllm.engine.sampler.processors import BatchRow, process
from kllm.engine.sampler.row import RowState
from kllm.engine.sampler.sampler import Sampler
from kllm.engine.sampler.sampling import cut_top_p, distribution, pick
from kllm.request import SamplingParams
from kllm.scheduling.plan import NewRow

V = 50
EOS = (7, 9)
CLOSE = 1e-5  # float32 may decide otherwise than float64 when a threshold is nearer than this


def new_row(params: SamplingParams, prompt=(1, 2), outputs=(), row: int = 0, seed: int = 0) -> NewRow:
    return NewRow(row, "r", [*prompt, *outputs], len(prompt), 0, [], params, seed)


class Undecided(Exception):
    pass


def decided(values: np.ndarray, threshold: float) -> None:
    if np.any(np.abs(values - threshold) < CLOSE):
        raise Undecided


def defined_logits(logits: np.ndarray, p: SamplingParams, prompt, outputs, mask) -> np.ndarray:
    out = logits.astype(np.float64)
    for token in range(V):
        banned = mask is not None and not mask[token]
        banned |= p.allowed_token_ids is not None and token not in p.allowed_token_ids
        for *prefix, last in p.bad_words_token_ids:
            banned |= last == token and list(outputs[len(outputs) - len(prefix) :]) == prefix
        stops = set(p.stop_token_ids) | (set() if p.ignore_eos else set(EOS))
        banned |= len(outputs) < p.min_tokens and token in stops
        if banned:
            out[token] = -np.inf
            continue
        out[token] += (p.logit_bias or {}).get(token, 0.0)
        if token in prompt or token in outputs:
            out[token] *= 1 / p.repetition_penalty if out[token] > 0 else p.repetition_penalty
        count = list(outputs).count(token)
        out[token] -= p.frequency_penalty * count + p.presence_penalty * (count > 0)
    return out


def softmax(logits: np.ndarray) -> np.ndarray:
    e = np.exp(logits - logits.max())
    return e / e.sum()


def defined_probabilities(logits: np.ndarray, p: SamplingParams) -> np.ndarray:
    """Raises Undecided where a cut is too close to call."""
    logits = logits / max(p.temperature, 0.01)
    if p.min_p > 0:
        probs = softmax(logits)
        decided(np.log(np.maximum(probs, 1e-300)), math.log(p.min_p * probs.max()))
        logits = np.where(probs >= p.min_p * probs.max(), logits, -np.inf)
    if 0 < p.top_k < V:
        kth = np.sort(logits)[::-1][p.top_k - 1]
        finite = logits[np.isfinite(logits)]
        near = np.abs(finite - kth) if np.isfinite(kth) else np.zeros(0)
        if np.any((near > 0) & (near < CLOSE)):
            raise Undecided
        logits = np.where(logits >= kth, logits, -np.inf)
    probs = softmax(logits)
    if p.top_p < 1:
        ascending = np.argsort(-probs, kind="stable")[::-1]
        sums = np.cumsum(probs[ascending])
        decided(sums, 1 - p.top_p)
        for token, total in zip(ascending[:-1], sums[:-1], strict=True):
            if total <= 1 - p.top_p:
                probs[token] = 0.0
    return probs / probs.sum()


tokens = st.integers(0, V - 1)


@st.composite
def sampling_params(draw) -> SamplingParams:
    maybe = lambda strategy, off: draw(st.one_of(st.just(off), strategy))  # noqa: E731
    return SamplingParams(
        temperature=draw(st.sampled_from([0.001, 0.3, 0.7, 1.0, 2.0])),
        top_k=maybe(st.integers(1, V + 5), 0),
        top_p=maybe(st.floats(0.01, 0.99), 1.0),
        min_p=maybe(st.floats(0.001, 1.0), 0.0),
        repetition_penalty=maybe(st.sampled_from([0.5, 1.1, 2.0]), 1.0),
        frequency_penalty=maybe(st.sampled_from([-1.0, 0.25, 2.0]), 0.0),
        presence_penalty=maybe(st.sampled_from([-0.5, 0.75]), 0.0),
        logit_bias=maybe(st.dictionaries(tokens, st.floats(-5, 5, width=32), max_size=5), None),
        allowed_token_ids=maybe(st.lists(tokens, min_size=1, max_size=30).map(tuple), None),
        bad_words_token_ids=tuple(draw(st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=3).map(tuple)))),
        min_tokens=draw(st.integers(0, 6)),
        max_tokens=None,
        stop_token_ids=tuple(draw(st.lists(tokens, max_size=2))),
        ignore_eos=draw(st.booleans()),
    )


@settings(max_examples=400, deadline=None)
@given(
    params=sampling_params(),
    prompt=st.lists(st.integers(0, 10), min_size=1, max_size=6),
    outputs=st.lists(st.integers(0, 5), max_size=6),
    numbers=st.integers(0, 2**32 - 1),
    tied=st.booleans(),
    masked=st.booleans(),
)
def test_distribution_is_the_defined_one(params, prompt, outputs, numbers, tied, masked):
    rng = np.random.default_rng(numbers)
    logits = (rng.standard_normal(V) * 3).astype(np.float32)
    if tied:
        logits = np.round(logits)
    mask = rng.random(V) < 0.8 if masked else None
    expected_logits = defined_logits(logits, params, prompt, outputs, mask)
    assume(np.isfinite(expected_logits).any())
    state = RowState(new_row(params, prompt, outputs), V, EOS)
    packed = None if mask is None else np.packbits(mask, bitorder="little").tobytes().ljust(8, b"\0")
    work = torch.from_numpy(logits.copy()).unsqueeze(0)
    process(work, [BatchRow(0, state, len(prompt) + len(outputs), packed)])
    np.testing.assert_allclose(work[0].numpy(), expected_logits, rtol=1e-5, atol=1e-5)
    try:
        # From the float32 logits, so that ties and near ties are the same ones.
        expected = defined_probabilities(work[0].numpy().astype(np.float64), params)
    except Undecided:
        assume(False)
    weights = distribution(work.clone(), [state])[0].astype(np.float64)
    np.testing.assert_allclose(weights / weights.sum(), expected, rtol=2e-4, atol=1e-7)


def chi_square(observed: np.ndarray, expected: np.ndarray) -> float:
    """Standard scores by which the statistic exceeds its mean; tokens expected less than 5 times are pooled."""
    rare = expected < 5
    if rare.any():
        observed = np.append(observed[~rare], observed[rare].sum())
        expected = np.append(expected[~rare], expected[rare].sum())
    keep = expected > 0
    assert observed[~keep].sum() == 0
    statistic = ((observed[keep] - expected[keep]) ** 2 / expected[keep]).sum()
    freedom = keep.sum() - 1
    return float((statistic - freedom) / math.sqrt(2 * freedom))


PARAMS = [
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=0.7, top_k=12),
    SamplingParams(temperature=1.3, top_p=0.8),
    SamplingParams(temperature=1.0, min_p=0.05, top_k=20, top_p=0.9),
]


@pytest.mark.parametrize("vary", ["position", "seed"])
@pytest.mark.parametrize("params", PARAMS)
def test_draws_follow_the_distribution(params, vary):
    """20,000 draws; fixed seeds, so the outcome is always the same. A score above 4 has a chance of about 1e-4."""
    n, batch = 20_000, 500
    logits = np.random.default_rng(5).standard_normal(V).astype(np.float32) * 2
    expected = defined_probabilities(logits.astype(np.float64), params)
    counts = np.zeros(V)
    sampler = Sampler(V, batch, EOS)
    for start in range(0, n, batch):
        many = range(start, start + batch)
        for i, k in enumerate(many):
            sampler.add(new_row(params, row=i, seed=77 if vary == "position" else k))
        positions = list(many) if vary == "position" else [2] * batch
        rows = torch.from_numpy(logits).repeat(batch, 1)
        for sampled in sampler.sample(rows, range(batch), positions, {}):
            counts[sampled.token] += 1
    assert chi_square(counts, expected * n) < 4


def test_uniform_is_uniform_and_draws_are_independent():
    draws = np.array([uniform(seed, position) for seed in range(-40, 40) for position in range(100)])
    assert draws.min() >= 0.0
    assert draws.max() < 1.0
    assert chi_square(np.histogram(draws, 50, (0, 1))[0].astype(float), np.full(50, len(draws) / 50)) < 4
    neighbours = np.corrcoef(draws[:-1], draws[1:])[0, 1]
    assert abs(neighbours) < 4 / math.sqrt(len(draws))
    assert uniform(2**63 - 1, 5) != uniform(-(2**63), 5)


@given(
    size=st.sampled_from([1, 50, 256, 257, 2000]),
    share=st.sampled_from([0.0, 0.01, 0.5, 1.0]),
    numbers=st.integers(0, 2**32 - 1),
    u=st.floats(0, 1, exclude_max=True),
)
@settings(max_examples=300, deadline=None)
def test_pick_is_the_inverse_of_the_cumulative_distribution(size, share, numbers, u):
    rng = np.random.default_rng(numbers)
    weights = (rng.random(size) * (rng.random(size) < share)).astype(np.float32)
    token = pick(weights, u)
    if weights.sum(dtype=np.float64) == 0:
        assert token is None
        return
    assert weights[token] > 0
    sums = np.cumsum(weights, dtype=np.float64)
    slack = 1e-9 * sums[-1]
    assert sums[token] > u * sums[-1] - slack
    assert sums[token] - weights[token] <= u * sums[-1] + slack


@pytest.mark.parametrize("u", [0.0, 1 - 2.0**-53])
def test_pick_at_the_ends_takes_tokens_that_have_weight(u):
    weights = np.zeros(1000, np.float32)
    weights[[3, 600]] = 0.1, 0.2
    assert pick(weights, u) == (3 if u == 0 else 600)


def test_top_p_keeps_lower_ids_among_equals():
    weights = np.full(10, 0.1, np.float32)
    cut_top_p(weights, 0.45)
    assert np.flatnonzero(weights).tolist() == [0, 1, 2, 3, 4]
    weights = np.array([0.1, 0.5, 0.1, 0.3], np.float32)
    cut_top_p(weights, 0.1)
    assert np.flatnonzero(weights).tolist() == [1]


def test_top_k_keeps_all_that_equal_the_kth():
    state = RowState(new_row(SamplingParams(top_k=2)), 4, EOS)
    weights = distribution(torch.tensor([[1.0, 3.0, 1.0, 0.0]]), [state])[0]
    assert np.flatnonzero(weights).tolist() == [0, 1, 2]
