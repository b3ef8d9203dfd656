"""Made-up loads: independent prompts, shared prefixes, long beside short, and conversations."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from kllm.workload.sample import OWN, PREFIX, REPLY, TURN, Part, Sample

LengthRange = tuple[int, int]  # fewest and most tokens, both possible, all equally likely


def random_samples(count: int, input_len: int, output_len: int, spread: float = 0.0, seed: int = 0) -> list[Sample]:
    """Independent random prompts. Lengths are uniform within ± `spread` (0 to 1) of those given."""
    rng = np.random.default_rng([seed, 1])
    inputs = _lengths(rng, within(input_len, spread), count)
    outputs = _lengths(rng, within(output_len, spread), count)
    return [
        Sample((_own(index, length),), output)
        for index, (length, output) in enumerate(zip(inputs, outputs, strict=True))
    ]


def shared_prefix_samples(
    count: int, num_prefixes: int, prefix_len: int, input_len: int, output_len: int
) -> list[Sample]:
    """Prompts of `prefix_len` shared tokens and `input_len` tokens of their own; prefixes take turns."""
    prefixes: list[tuple[Part, ...]] = [(((PREFIX, i), prefix_len),) if prefix_len else () for i in range(num_prefixes)]
    return [Sample((*prefixes[i % num_prefixes], _own(i, input_len)), output_len) for i in range(count)]


def long_short_samples(
    count: int, long_share: float, short: LengthRange, long: LengthRange, output: LengthRange, seed: int = 0
) -> list[Sample]:
    """Independent prompts, of which each is long with probability `long_share`; outputs do not depend on that."""
    rng = np.random.default_rng([seed, 2])
    is_long = (rng.random(count) < long_share).tolist()
    shorts, longs, outputs = (_lengths(rng, lengths, count) for lengths in (short, long, output))
    inputs = [longs[i] if is_long[i] else shorts[i] for i in range(count)]
    return [
        Sample((_own(index, length),), out) for index, (length, out) in enumerate(zip(inputs, outputs, strict=True))
    ]


def session_samples(
    count: int, turns: int, input_len: int, growth: int, output_len: int, think_s: float, seed: int = 0
) -> list[Sample]:
    """Conversations of `turns` turns (the last may be cut short by `count`), one after the other in the list.

    The first prompt has `input_len` tokens. Each later one is the prompt before it, `output_len` tokens that stand for
    its output, and `growth` new tokens; it goes out a pause after the previous output has ended, exponentially
    distributed with mean `think_s` seconds. What a server generated is not known here: a prompt shares with its
    predecessor the tokens of that prompt, not those of the output. First turns have arrival_s 0: see with_arrivals.
    """
    rng = np.random.default_rng([seed, 3])
    samples: list[Sample] = []
    for index in range(count):
        session, turn = divmod(index, turns)
        if turn == 0:
            samples.append(Sample((((TURN, session, 0), input_len),), output_len))
            continue
        reply, question = ((REPLY, session, turn - 1), output_len), ((TURN, session, turn), growth)
        parts = (*samples[-1].parts, reply, question)
        samples.append(Sample(parts, output_len, float(rng.exponential(think_s)), index - 1))
    return samples


def with_arrivals(samples: Sequence[Sample], arrivals: Iterator[float]) -> list[Sample]:
    """The same samples at these times. Samples that follow another keep their pause."""
    return [sample if sample.after is not None else replace(sample, arrival_s=next(arrivals)) for sample in samples]


def within(mean: int, spread: float) -> LengthRange:
    """Lengths of at least 1 within ± `spread` (0 to 1) of `mean`."""
    return max(1, round(mean * (1 - spread))), max(1, round(mean * (1 + spread)))


def _own(index: int, length: int) -> Part:
    return (OWN, index), length


def _lengths(rng: np.random.Generator, lengths: LengthRange, count: int) -> list[int]:
    low, high = lengths
    drawn: list[int] = rng.integers(low, high + 1, size=count).tolist()
    return drawn
