from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kllm.costs.step import StepWork, selected_tokens, step_work

ROW = st.tuples(st.integers(0, 300), st.integers(1, 60), st.booleans())


@given(rows=st.lists(ROW, max_size=6), top_k=st.none() | st.integers(1, 80))
def test_sums_are_those_of_counting_token_by_token(rows, top_k):
    work = step_work(rows, top_k)
    attended = [position + 1 for start, count, _ in rows for position in range(start, start + count)]
    assert work == StepWork(
        rows=len(rows),
        new_tokens=len(attended),
        sampled=sum(sampled for _, _, sampled in rows),
        context=sum(start + count for start, count, _ in rows),
        attended=sum(attended),
        selected=sum(min(length, top_k) if top_k else length for length in attended),
        longest=max((count for _, count, _ in rows), default=0),
    )


def test_selected_tokens_grow_to_the_limit_and_stay():
    assert selected_tokens(0, 4, 2) == 1 + 2 + 2 + 2
    assert selected_tokens(10, 3, 2) == 6
    assert selected_tokens(0, 3, 100) == 1 + 2 + 3
