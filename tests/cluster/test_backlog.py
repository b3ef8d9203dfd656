"""The gateway's own count of an instance's work: its sums, and what reports make of it."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kllm.cluster.backlog import Backlog
from kllm.messages import EngineLoad


def test_a_request_is_counted_from_submission_to_its_end() -> None:
    backlog = Backlog()
    backlog.add("a", 0, 1000, lacking=400)
    backlog.add("b", 0, 2000, lacking=16, pulling=1984)
    assert (backlog.holding, backlog.prefilling, backlog.prefills, backlog.pulling) == (3000, 416, 2, 1984)
    backlog.has_output("b")
    assert (backlog.holding, backlog.prefilling, backlog.prefills, backlog.pulling) == (3000, 400, 1, 0)
    backlog.forget("a")
    backlog.forget("b")
    assert (backlog.holding, backlog.prefilling, backlog.prefills) == (0, 0, 0)


def test_a_report_counts_what_it_names() -> None:
    backlog = Backlog()
    backlog.add("a", 1, 1000, lacking=400)
    backlog.add("b", 0, 1000, lacking=300)
    backlog.report(EngineLoad(progress={"a": (0, 5)}))  # of an earlier attempt
    assert backlog.unreported == 700
    backlog.report(EngineLoad(progress={"a": (1, 0)}))
    backlog.report(EngineLoad(progress={"a": (1, 0)}))
    assert (backlog.unreported, backlog.prefilling) == (300, 700)
    backlog.has_output("a")
    assert (backlog.unreported, backlog.prefilling) == (300, 300)


def test_what_others_have_sent_is_what_is_left_of_a_report() -> None:
    backlog = Backlog()
    backlog.add("a", 0, 1000, lacking=400)
    backlog.report(EngineLoad(running=3, waiting=2))
    assert backlog.foreign == 4
    backlog.report(EngineLoad())
    assert backlog.foreign == 0


ids = st.sampled_from("abc")
reports = st.builds(EngineLoad, progress=st.dictionaries(ids, st.tuples(st.integers(0, 2), st.just(0))))
moves = st.one_of(
    st.tuples(st.just("add"), ids, st.integers(0, 2), st.integers(0, 99), st.integers(0, 99), st.integers(0, 99)),
    st.tuples(st.just("has_output"), ids),
    st.tuples(st.just("forget"), ids),
    st.tuples(
        st.just("report"),
        st.builds(EngineLoad, progress=st.dictionaries(ids, st.tuples(st.integers(0, 2), st.just(0)))),
    ),
)


@given(st.lists(moves, max_size=30))
def test_the_sums_are_right_after_any_moves(made: list[tuple[object, ...]]) -> None:
    backlog = Backlog()
    for name, *arguments in made:
        getattr(backlog, str(name))(*arguments)
        backlog.check()
