"""Exchange: one instance, many gateways, and nothing of one ever reaches another."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kllm.messages import (
    Abort,
    CacheCleared,
    CacheDelta,
    CacheDump,
    ClearCache,
    Deltas,
    Down,
    Drain,
    Drained,
    EngineLoad,
    Failed,
    Hello,
    Leaving,
    Ping,
    PrefillDone,
    Release,
    SetGrade,
    SetRole,
    Starting,
    Submit,
    WatchCache,
)
from kllm.request import Delta, Request, SamplingParams
from kllm.transport.exchange import Exchange

HELLO = Hello(instance_id="i", incarnation="x")
A, B, C = b"a", b"b", b"c"


def submit(request_id: str, attempt: int = 0, leader: str | None = None) -> Submit:
    request = Request(request_id=request_id, prompt_token_ids=[1], params=SamplingParams(), leader=leader)
    return Submit(request=request, attempt=attempt)


def name_in(message: Down) -> str:
    """What the instance calls a submitted request."""
    assert isinstance(message, Submit)
    return message.request.request_id


def joined(*keys: bytes, lease_reports: int = 30) -> Exchange:
    """An exchange whose instance is ready, with these gateways, which have answered."""
    exchange = Exchange(lease_reports)
    exchange.said(HELLO)
    for key in keys:
        exchange.heard(key, Ping())
        exchange.heard(key, Ping())
    return exchange


def test_a_gateway_that_comes_is_told_how_far_the_start_is() -> None:
    exchange = Exchange()
    assert exchange.heard(A, Ping()) == ([], [])
    loading = Starting(phase="load weights")
    assert exchange.said(loading).up == [(A, loading)]
    assert exchange.heard(B, Ping()).up == [(B, loading)]
    assert exchange.said(HELLO).up == [(A, HELLO), (B, HELLO)]
    assert exchange.heard(C, Ping()).up == [(C, HELLO)]


def test_hello_is_repeated_to_those_who_have_not_answered() -> None:
    exchange = joined(A)
    exchange.heard(B, Ping())
    up = exchange.said(EngineLoad(progress={})).up
    assert [(key, type(message)) for key, message in up] == [(A, EngineLoad), (B, Hello), (B, EngineLoad)]
    exchange.heard(B, Ping())
    assert len(exchange.said(EngineLoad(progress={})).up) == 2


def test_the_same_id_of_two_gateways_is_two_requests() -> None:
    exchange = joined(A, B)
    of_a, of_b = (exchange.heard(key, submit("r", leader="r0")).down[0] for key in (A, B))
    assert isinstance(of_a, Submit)
    assert name_in(of_a) != name_in(of_b)
    assert of_a.request.leader == name_in(of_a) + "0"
    up = exchange.said(Deltas(items=[Delta(request_id=name_in(of_b), token_ids=[7])])).up
    assert up == [(B, Deltas(items=[Delta(request_id="r", token_ids=[7])]))]
    done = PrefillDone(request_id=name_in(of_a), attempt=0, num_outputs=1)
    assert exchange.said(done).up == [(A, PrefillDone(request_id="r", attempt=0, num_outputs=1))]
    progress = {name_in(of_a): (0, 1), name_in(of_b): (0, 4)}
    loads = dict(exchange.said(EngineLoad(running=2, progress=progress)).up)
    assert loads == {key: EngineLoad(running=2, progress={"r": (0, at)}) for key, at in ((A, 1), (B, 4))}
    assert exchange.heard(A, Abort(request_ids=["r"], attempt=0)).down == [
        Abort(request_ids=[name_in(of_a)], attempt=0)
    ]
    assert not exchange.requests(A)
    assert exchange.requests(B) == {"r": 0}


def test_a_gateway_that_is_lost_takes_its_own_requests_with_it() -> None:
    exchange = joined(A, B)
    names = [name_in(exchange.heard(A, submit(request_id)).down[0]) for request_id in ("r", "s")]
    other = name_in(exchange.heard(B, submit("r")).down[0])
    assert exchange.lost(A) == ([Abort(request_ids=names)], [])
    assert exchange.lost(A) == ([], [])
    late = Deltas(items=[Delta(request_id=name, token_ids=[1]) for name in (*names, other)])
    assert exchange.said(late).up == [(B, Deltas(items=[Delta(request_id="r", token_ids=[1])]))]


def test_one_that_comes_back_is_another() -> None:
    """What it had is not mistaken for what it has, whatever ids it uses."""
    exchange = joined(A)
    before = name_in(exchange.heard(A, submit("r")).down[0])
    exchange.lost(A)
    again = exchange.heard(A, submit("r", attempt=1))
    assert again.up == [(A, HELLO)]
    assert name_in(again.down[0]) != before
    assert exchange.said(Deltas(items=[Delta(request_id=before, token_ids=[1])])).up == []


def test_silence_ends_the_lease() -> None:
    exchange = joined(A, B, lease_reports=3)
    name = name_in(exchange.heard(A, submit("r")).down[0])
    for _ in range(3):
        exchange.heard(B, Ping())
        assert exchange.said(EngineLoad(progress={name: (0, 0)})).down == []
    exchange.heard(B, Ping())
    turn = exchange.said(EngineLoad(progress={name: (0, 0)}))
    assert turn.down == [Abort(request_ids=[name])]
    assert turn.up == [(B, EngineLoad(progress={}))]
    assert exchange.gateways == 1


def test_drain_of_one_gateway_is_its_leave() -> None:
    exchange = joined(A, B)
    name = name_in(exchange.heard(A, submit("r")).down[0])
    assert exchange.heard(A, Drain()) == ([Abort(request_ids=[name])], [(A, Drained())])
    assert exchange.gateways == 1


def test_a_dump_goes_to_who_asked_and_changes_to_who_watches() -> None:
    exchange = joined(A, B, C)
    change, dump = CacheDelta(sequence=1, changes=[]), CacheDump(sequence=1, changes=[])
    assert exchange.said(change).up == []
    assert exchange.heard(A, WatchCache()).down == [WatchCache()]
    assert exchange.said(dump).up == [(A, dump)]
    assert exchange.said(change).up == [(A, change)]
    exchange.heard(B, WatchCache())
    assert exchange.said(change).up == [(A, change), (B, change)]
    assert exchange.said(dump).up == [(B, dump)]
    assert exchange.said(dump).up == []


def test_an_answer_goes_to_who_asked() -> None:
    exchange = joined(A, B)
    questions = [exchange.heard(key, ClearCache(token="0", store=True)).down[0] for key in (A, B)]
    tokens = [question.token for question in questions if isinstance(question, ClearCache)]
    assert len(set(tokens)) == 2
    assert exchange.said(CacheCleared(token=tokens[1], complete=True)).up == [
        (B, CacheCleared(token="0", complete=True))
    ]
    exchange.lost(A)
    assert exchange.said(CacheCleared(token=tokens[0], complete=True)).up == []


@pytest.mark.parametrize("message", [Release(leases=["l"]), SetRole(role="decode", term=3)])
def test_what_concerns_the_instance_goes_there_as_it_is(message: Down) -> None:
    assert joined(A, B).heard(B, message) == ([message], [])


def test_the_highest_grade_holds_and_nobody_asks_again() -> None:
    exchange = joined(A, B)
    assert exchange.heard(A, SetGrade(grade=2)).down == [SetGrade(grade=2)]
    assert exchange.heard(B, SetGrade(grade=1)).down == [SetGrade(grade=2)]
    assert [load.grade for _, load in exchange.said(EngineLoad(grade=2)).up if isinstance(load, EngineLoad)] == [2, 1]
    assert [load.grade for _, load in exchange.said(EngineLoad(grade=0)).up if isinstance(load, EngineLoad)] == [0, 0]
    assert exchange.lost(A).down == [SetGrade(grade=1)]
    assert exchange.lost(B).down == [SetGrade(grade=0)]


def test_who_joins_later_learns_the_role_of_now() -> None:
    exchange = joined(A)
    exchange.said(EngineLoad(role="decode", term=3))
    assert exchange.heard(B, Ping()).up == [(B, Hello(instance_id="i", incarnation="x", role="decode", term=3))]


def test_who_joins_one_that_is_leaving_is_told() -> None:
    exchange = joined(A)
    assert exchange.said(Leaving()).up == [(A, Leaving())]
    assert exchange.heard(B, Ping()).up == [(B, HELLO), (B, Leaving())]


def test_too_many_gateways_are_refused() -> None:
    exchange = Exchange(most=2)
    exchange.heard(A, Ping())
    exchange.heard(B, Ping())
    ((key, refusal),) = exchange.heard(C, submit("r")).up
    assert key == C
    assert isinstance(refusal, Failed)
    assert exchange.gateways == 2
    exchange.lost(A)
    assert len(exchange.heard(C, submit("r")).down) == 1


@settings(max_examples=200, deadline=None)
@given(seed=st.integers(0, 2**32 - 1))
def test_every_gateway_gets_its_own_and_only_that(seed: int) -> None:
    """Random histories against a plain account of who holds what."""
    rng = random.Random(seed)
    exchange = Exchange(lease_reports=4)
    exchange.said(HELLO)
    keys, ids = [A, B, C], ["r", "1:r", "2:r", ":", ""]
    held: dict[tuple[bytes, str], tuple[str, int]] = {}  # (gateway, its id) -> the instance's name, attempt
    names: set[str] = set()  # ever used, with the gateway's connection in mind
    quiet = dict.fromkeys(keys, 0)
    gone = set(keys)

    def leaves(key: bytes, down: list[Down]) -> None:
        own = {place for place in held if place[0] == key}
        aborted = [name for message in down if isinstance(message, Abort) for name in message.request_ids]
        assert sorted(aborted) == sorted(held.pop(place)[0] for place in own)
        gone.add(key)

    for step in range(60):
        key, request_id = rng.choice(keys), rng.choice(ids)
        match rng.randrange(7):
            case 0 | 1:
                turn = exchange.heard(key, submit(request_id, attempt=step))
                name = name_in(turn.down[0])
                fresh = key in gone
                gone.discard(key)
                assert (name in names) <= (not fresh), "a name of an earlier connection is used again"
                names.add(name)
                held[key, request_id] = (name, step)
                quiet[key] = 0
            case 2 if held:
                place = rng.choice(list(held))
                name, attempt = held[place]
                ends = rng.random() < 0.5
                delta = Delta(request_id=name, attempt=attempt, finish_reason="length" if ends else None)
                ((to, deltas),) = exchange.said(Deltas(items=[delta])).up
                assert isinstance(deltas, Deltas)
                assert (to, deltas.items[0].request_id, deltas.items[0].attempt) == (*place, attempt)
                if ends:
                    del held[place]
            case 3 if held:
                place = rng.choice(list(held))
                name, attempt = held[place]
                stale = rng.random() < 0.3
                abort = Abort(request_ids=[place[1]], attempt=attempt - 1 if stale else attempt)
                assert exchange.heard(place[0], abort).down == [Abort(request_ids=[name], attempt=abort.attempt)]
                quiet[place[0]] = 0
                if not stale:
                    del held[place]
            case 4:
                leaves(key, exchange.lost(key).down)
            case 5:
                turn = exchange.said(EngineLoad(progress={name: (attempt, 1) for name, attempt in held.values()}))
                for silent in keys:
                    quiet[silent] += 1
                    if quiet[silent] > 4 and silent not in gone:
                        mine = {held[place][0] for place in held if place[0] == silent}
                        leaves(silent, [m for m in turn.down if isinstance(m, Abort) and mine & set(m.request_ids)])
                for to, load in turn.up:
                    if isinstance(load, EngineLoad):
                        mine_now = {i: (attempt, 1) for (k, i), (_, attempt) in held.items() if k == to}
                        assert load.progress == mine_now
                assert {to for to, load in turn.up if isinstance(load, EngineLoad)} == set(keys) - gone
            case 6 if key not in gone:
                exchange.heard(key, Ping())
                quiet[key] = 0
        for each in keys:
            mine = {i: attempt for (k, i), (_, attempt) in held.items() if k == each}
            assert exchange.requests(each) == mine
        assert exchange.gateways == len(set(keys) - gone)
