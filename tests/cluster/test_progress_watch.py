from __future__ import annotations

from support.scripted_instance import make_request

from kllm.cluster.progress_watch import MISSING_REPORTS, ProgressWatch
from kllm.cluster.request_stream import RequestStream
from kllm.request import Delta


def make_stream(name: str = "r", tokens: int = 0, attempt: int = 0) -> RequestStream:
    stream = RequestStream(make_request(name), lambda _: None, first_attempt=attempt)
    if tokens:
        stream.accept(Delta(request_id=name, attempt=attempt, token_ids=list(range(tokens))))
    return stream


def test_only_several_reports_in_a_row_without_a_request_count() -> None:
    watch, stream = ProgressWatch(), make_stream()
    for _ in range(3):
        for _ in range(MISSING_REPORTS - 1):
            assert not watch.astray({}, {"r": stream})
        assert not watch.astray({"r": (0, 0)}, {"r": stream})
    found = [watch.astray({}, {"r": stream}) for _ in range(MISSING_REPORTS)]
    assert [len(each) for each in found] == [0] * (MISSING_REPORTS - 1) + [1]
    assert found[-1][0][0] is stream


def test_an_older_attempt_there_is_as_good_as_none_and_a_new_attempt_starts_afresh() -> None:
    watch, stream = ProgressWatch(), make_stream(attempt=2)
    for _ in range(MISSING_REPORTS - 1):
        assert not watch.astray({"r": (1, 5)}, {"r": stream})
    stream.next_attempt(died=False)
    for _ in range(MISSING_REPORTS - 1):
        assert not watch.astray({"r": (1, 5)}, {"r": stream})
    assert watch.astray({"r": (1, 5)}, {"r": stream})


def test_tokens_promised_by_the_report_before_must_have_come() -> None:
    watch, stream = ProgressWatch(), make_stream(tokens=4)
    assert not watch.astray({"r": (0, 6)}, {"r": stream}), "they may still be on their way"
    [(found, why)] = watch.astray({"r": (0, 8)}, {"r": stream})
    assert found is stream
    assert "token 4 did not arrive" in why
    watch = ProgressWatch()
    assert not watch.astray({"r": (0, 6)}, {"r": stream})
    stream.accept(Delta(request_id="r", index=4, token_ids=[1, 2]))
    assert not watch.astray({"r": (0, 8)}, {"r": stream})


def test_promises_of_an_older_attempt_do_not_count() -> None:
    watch, stream = ProgressWatch(), make_stream()
    assert not watch.astray({"r": (0, 6)}, {"r": stream})
    stream.next_attempt(died=False)
    assert not watch.astray({"r": (1, 0)}, {"r": stream})
    assert not watch.astray({"r": (1, 0)}, {"r": stream})


def test_strays_are_what_nobody_waits_for() -> None:
    assigned = {"here": make_stream("here", attempt=3), "newer": make_stream("newer", attempt=3)}
    progress = {"here": (3, 1), "newer": (2, 9), "ended": (0, 4)}
    assert ProgressWatch.strays(progress, assigned) == [("newer", 2), ("ended", 0)]
