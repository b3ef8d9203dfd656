"""What an instance of several gateways pays to tell them apart: python benchmarks/exchange.py"""

from __future__ import annotations

import time
from collections.abc import Callable

from kllm.messages import Deltas, EngineLoad, Hello, Submit
from kllm.request import Delta, Request, SamplingParams
from kllm.transport.exchange import Exchange

REQUESTS = 64
GATEWAYS = 2
ROUNDS, REPEATS = 7, 500


def best(work: Callable[[], object]) -> float:
    """Seconds of one call, in the quickest round."""
    rounds = []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        for _ in range(REPEATS):
            work()
        rounds.append((time.perf_counter() - start) / REPEATS)
    return min(rounds)


def main() -> None:
    exchange = Exchange(lease_reports=ROUNDS * REPEATS)
    exchange.said(Hello(instance_id="i", incarnation="1"))
    names = []
    for index in range(REQUESTS):
        request = Request(request_id=f"cmpl-{index}", prompt_token_ids=[1], params=SamplingParams())
        (submit,) = exchange.heard(str(index % GATEWAYS).encode(), Submit(request=request)).down
        assert isinstance(submit, Submit)
        names.append(submit.request.request_id)
    deltas = Deltas(items=[Delta(request_id=name, token_ids=[1], index=3) for name in names])
    load = EngineLoad(progress=dict.fromkeys(names, (0, 3)))
    print(f"delta   {best(lambda: exchange.said(deltas)) / REQUESTS * 1e6:6.2f} us")
    print(f"report  {best(lambda: exchange.said(load)) * 1e6:6.2f} us")


if __name__ == "__main__":
    main()
