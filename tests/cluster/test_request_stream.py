from __future__ import annotations

import asyncio

import hypothesis.strategies as st
import pytest
from hypothesis import given
from support.scripted_instance import make_request
from support.virtual_time import run

from kllm.cluster.request_stream import PROOF_TOKENS, End, Gap, RequestStream
from kllm.request import Delta, Timings, TokenLogprobs


def make_stream() -> RequestStream:
    return RequestStream(make_request(), lambda _: None)


def delta(index: int, tokens: list[int], **fields: object) -> Delta:
    return Delta(request_id="r", index=index, token_ids=tokens, **fields)  # type: ignore[arg-type]


def test_what_is_known_is_trimmed() -> None:
    async def main() -> None:
        stream = make_stream()
        assert stream.accept(delta(0, [1, 2]))
        assert not stream.accept(delta(0, [1, 2]))
        assert not stream.accept(delta(1, [2]))
        entries = [TokenLogprobs(token, 0.0, 1) for token in (2, 3, 4)]
        assert stream.accept(delta(1, [2, 3, 4], logprobs=entries))
        assert await anext(stream) == delta(0, [1, 2, 3, 4], logprobs=entries[1:])
        with pytest.raises(Gap, match="at token 6 follows token 4"):
            stream.accept(delta(6, [7]))
        assert stream.accept(delta(0, [1, 2, 3, 4], finish_reason="length"))
        assert [item async for item in stream] == [delta(4, [], finish_reason="length")]
        assert stream.end is End.COMPLETED
        assert not stream.accept(delta(4, [5]))

    run(main())


def test_a_merged_delta_keeps_everything() -> None:
    async def main() -> None:
        stream = make_stream()
        stream.accept(delta(0, [], prompt_logprobs=[None]))
        stream.accept(delta(0, [1], timings=Timings(1.0, 2.0), num_cached_tokens=16))
        stream.accept(delta(1, [2], finish_reason="stop", stop_reason=2))
        assert await anext(stream) == delta(
            0,
            [1, 2],
            prompt_logprobs=[None],
            timings=Timings(1.0, 2.0),
            num_cached_tokens=16,
            finish_reason="stop",
            stop_reason=2,
        )

    run(main())


def test_strikes_count_attempts_in_a_row_without_progress() -> None:
    async def main() -> None:
        stream = make_stream()
        stream.next_attempt()
        assert (stream.attempt, stream.strikes) == (1, 1)
        assert not stream.accept(delta(0, [9])), "a delta of the first attempt"
        assert stream.accept(delta(0, list(range(PROOF_TOKENS)), attempt=1))
        stream.next_attempt()
        assert (stream.attempt, stream.strikes) == (2, 0)
        stream.next_attempt()
        assert (stream.attempt, stream.strikes) == (3, 1)

    run(main())


def test_attempts_lost_on_the_way_are_no_strikes() -> None:
    async def main() -> None:
        stream = make_stream()
        for losses in (1, 2):
            stream.next_attempt(died=False)
            assert (stream.strikes, stream.losses, stream.trusted) == (0, losses, False)
        stream.accept(delta(0, [1], attempt=2))
        stream.next_attempt(died=False)
        assert (stream.attempts, stream.losses) == (4, 0)
        stream.next_attempt()
        stream.next_attempt(died=False)
        assert (stream.strikes, stream.trusted) == (1, False)
        stream.accept(delta(1, [0] * PROOF_TOKENS, attempt=5))
        assert stream.trusted
        assert [stream.takes_proof() for _ in range(2)] == [True, False]
        stream.next_attempt(died=False)
        assert (stream.strikes, stream.trusted) == (0, True)
        stream.next_attempt()
        assert (stream.strikes, stream.trusted) == (1, False)

    run(main())


@given(
    pieces=st.lists(st.integers(1, 3), min_size=1, max_size=12),
    reads=st.lists(st.booleans(), min_size=12, max_size=12),
    logprobs=st.booleans(),
    restart=st.integers(0, 12),
    repeated=st.integers(0, 3),
)
def test_whatever_the_reader_skips_the_whole_is_the_same(
    pieces: list[int], reads: list[bool], logprobs: bool, restart: int, repeated: int
) -> None:
    """Deltas read one by one, or several as one, add up to the same output, through a new attempt and repetitions."""

    def entries(tokens: list[int]) -> list[TokenLogprobs] | None:
        return [TokenLogprobs(token, -float(token), 1) for token in tokens] if logprobs else None

    async def main() -> None:
        stream = make_stream()
        got: list[Delta] = []
        start = 0
        for i, (size, wanted) in enumerate(zip(pieces, reads, strict=False)):
            if i == restart:
                stream.next_attempt()
            first = max(0, start - repeated) if i == restart else start
            tokens = list(range(first, start + size))
            fresh = i in (0, restart)
            assert stream.accept(
                delta(
                    first,
                    tokens,
                    attempt=stream.attempt,
                    logprobs=entries(tokens),
                    num_cached_tokens=10 * (stream.attempt + 1),
                    timings=Timings(float(i), 0.0) if fresh else None,
                    finish_reason="length" if i == len(pieces) - 1 else None,
                )
            )
            start += size
            if wanted:
                got.append(await anext(stream))
        got += [item async for item in stream]
        total = list(range(start))
        assert [token for item in got for token in item.token_ids] == total == stream.outputs
        assert [item.index for item in got] == [sum(len(g.token_ids) for g in got[:i]) for i in range(len(got))]
        if logprobs:
            assert [entry for item in got for entry in item.logprobs or ()] == entries(total)
        assert [item.timings is not None for item in got] == [True] + [False] * (len(got) - 1)
        assert {item.num_cached_tokens for item in got} == {got[0].num_cached_tokens}
        assert [item.finish_reason for item in got] == [None] * (len(got) - 1) + ["length"]

    run(main())


def test_waiting_for_the_end_reads_nothing() -> None:
    async def main() -> None:
        stream = make_stream()
        waiting = asyncio.create_task(stream.wait_ended())
        for i in range(100):
            stream.accept(delta(i, [i]))
            await asyncio.sleep(0)
            assert not waiting.done()
        stream.accept(delta(100, [], finish_reason="stop"))
        await waiting
        await stream.wait_ended()
        assert [item async for item in stream] == [delta(0, list(range(100)), finish_reason="stop")]

    run(main())


def test_cancelling_the_wait_closes_the_stream() -> None:
    async def main() -> None:
        closed: list[RequestStream] = []
        stream = RequestStream(make_request(), closed.append)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(stream.wait_ended(), 1.0)
        assert closed == [stream]
        assert stream.end is End.ABORT

    run(main())


def test_closing_ends_the_wait() -> None:
    async def main() -> None:
        stream = make_stream()
        waiting = asyncio.create_task(stream.wait_ended())
        await asyncio.sleep(0)
        await stream.aclose()
        await waiting

    run(main())


@pytest.mark.parametrize(("method", "end"), [("abort", End.ABORT), ("fail", End.ERROR)])
def test_the_gateway_can_end_it(method: str, end: End) -> None:
    async def main() -> None:
        stream = make_stream()
        waiting = asyncio.create_task(anext(stream))  # type: ignore[arg-type]
        await asyncio.sleep(0)
        stream.abort() if method == "abort" else stream.fail("broken")
        last = await waiting
        assert last.finish_reason == {"abort": "abort", "fail": "error"}[method]
        assert last.error == {"abort": None, "fail": "broken"}[method]
        assert stream.end is end
        with pytest.raises(StopAsyncIteration):
            await anext(stream)

    run(main())
