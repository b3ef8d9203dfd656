from __future__ import annotations

import asyncio

import pytest
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
