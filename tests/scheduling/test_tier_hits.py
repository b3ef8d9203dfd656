"""Hits are credited to the tiers they came from, and add up."""

from __future__ import annotations

import pytest

from kllm.cache.manager import KVManager
from kllm.messages import Submit
from kllm.request import Request, SamplingParams
from kllm.scheduling.scheduler import MOST_LOOKUPS, Scheduler
from kllm.scheduling.sequence import Sequence

BLOCK = 4


class Tiers:
    """A scheduler with one prompt, of which `present` blocks are in the cache."""

    def __init__(self, present: int) -> None:
        kv = KVManager(64, BLOCK)
        self.scheduler = Scheduler(kv, max_model_len=100, max_num_seqs=4, max_tokens_per_step=64, looks_up=True)
        tokens = list(range(10 * BLOCK + 1))
        request = Request(request_id="r", prompt_token_ids=tokens, params=SamplingParams(max_tokens=1))
        assert self.scheduler.add(Submit(request=request), 0.0) is None
        [self.sequence] = self.scheduler.take_lookups()
        self._fill(kv, self.sequence, present)

    @staticmethod
    def _fill(kv: KVManager, sequence: Sequence, blocks: int) -> None:
        holding = kv.open()
        assert kv.grow(holding, blocks * BLOCK) is not None
        kv.commit(holding, sequence.tokens, blocks * BLOCK, None)
        kv.close(holding)


@pytest.mark.parametrize(
    ("present", "brought", "l2", "l3", "wasted"),
    [
        (6, (6, 0, 0), 0, 0, 0),
        (6, (2, 3, 1), 3, 1, 0),
        (8, (2, 3, 1), 3, 1, 0),  # others have computed more
        (3, (0, 3, 3), 1, 2, 3),  # half of it is gone again: it cannot be said which, but three blocks are three
        (2, (2, 1, 1), 0, 0, 2),
        (1, (2, 1, 1), 0, 0, 2),
        (5, (0, 7, 2), 4, 1, 4),
    ],
)
def test_credit(present: int, brought: tuple[int, int, int], l2: int, l3: int, wasted: int) -> None:
    tiers = Tiers(present)
    times = 1
    tiers.scheduler.found(tiers.sequence, tiers.sequence.epoch, brought)
    while tiers.scheduler.plan(0.0) is None:  # what is gone is looked up again
        assert tiers.scheduler.take_lookups() == [tiers.sequence]
        tiers.scheduler.found(tiers.sequence, tiers.sequence.epoch, brought)
        assert wasted or present < sum(brought)
        times += 1
    assert times == (1 if present >= sum(brought) else 1 + MOST_LOOKUPS)
    load = tiers.scheduler.load()
    assert load.prefix_hits == present * BLOCK
    assert (load.l2_hits, load.l3_hits, load.wasted) == (l2 * BLOCK, l3 * BLOCK, wasted * times)
