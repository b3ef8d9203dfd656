"""Sequence: what the scheduler knows about one request."""

from __future__ import annotations

from array import array
from enum import Enum, auto

from kllm.cache.manager import Holding
from kllm.messages import Submit
from kllm.request import Delta, FinishReason, Timings, TokenLogprobs


class State(Enum):
    HELD = auto()  # its grammar is being compiled, or its prefix looked up in the lower tiers
    FOLLOWING = auto()  # its leader computes the prompt they share
    WAITING = auto()  # wants a place
    RUNNING = auto()  # has a row and KV blocks
    ENDED = auto()


class Sequence:
    """One request at the instance. Changed by the Scheduler only.

        tokens     [ prompt ......... | outputs ... ] ? ?      ?: sampled by plans in flight, value unknown (pending)
                           ▲computed        ▲planned

    limit: number of tokens at which it ends by length. epoch: counts preemptions; results of older ones are dropped.
    sent_blocks, sent_tokens: what the runner has been told. needs: blocks that must be available before admission
    is worth another try. overtaken: later ones admitted while it did not fit. expected: tokens that the cache had when
    it began to wait. looking: it is being looked up in the lower tiers. put_off: it will be when its turn comes;
    lookups: how often that happened. brought: blocks that L1 had then, and that came there from L2 and from L3.
    yields: how often its prompt has given way to others (FairShare). hands_over: it leaves after its next token, and
    goes on elsewhere; staged: blocks of it that are on their way down for that. kv: where KV of it can be had from.
    """

    __slots__ = (
        "admitted_at",
        "arrival",
        "arrived_at",
        "attempt",
        "brought",
        "cached",
        "computed",
        "epoch",
        "expected",
        "first_token_at",
        "followers",
        "hands_over",
        "held",
        "holding",
        "kv",
        "last_plan",
        "limit",
        "looking",
        "lookups",
        "needs",
        "num_prompt",
        "overtaken",
        "params",
        "pending",
        "planned",
        "prompt_logprobs",
        "put_off",
        "request",
        "row",
        "sent_blocks",
        "sent_tokens",
        "staged",
        "state",
        "tokens",
        "yields",
    )

    def __init__(self, submit: Submit, arrival: int, now: float, limit: int) -> None:
        request = submit.request
        self.request = request
        self.params = request.params
        self.attempt = submit.attempt
        self.num_prompt = len(request.prompt_token_ids)
        self.tokens = array("i", request.prompt_token_ids)
        self.tokens.extend(submit.outputs)
        self.arrival = arrival
        self.limit = limit
        self.hands_over = False
        self.kv = submit.kv
        self.state = State.WAITING
        self.held = False
        self.looking = False
        self.put_off = False
        self.lookups = 0
        self.brought = (0, 0, 0)
        self.followers: list[Sequence] = []
        self.arrived_at = now
        self.admitted_at: float | None = None
        self.first_token_at: float | None = None
        self.cached = 0
        self.epoch = 0
        self.needs = 0
        self.overtaken = 0
        self.expected = 0
        self.yields = 0
        self.prompt_logprobs: list[TokenLogprobs | None] = []
        self.holding: Holding | None = None
        self.last_plan = -1
        self._reset()

    def _reset(self) -> None:
        self.row = -1
        self.planned = self.computed = self.pending = 0
        self.sent_blocks = self.sent_tokens = self.staged = 0
        self.prompt_logprobs.clear()

    def lose_place(self) -> None:
        """Forget all that was computed (preemption)."""
        self.epoch += 1
        self.put_off = False
        self.lookups = 0
        self.brought = (0, 0, 0)
        self.kv = None  # it may have been let go since
        self.holding = None
        self._reset()

    @property
    def num_outputs(self) -> int:
        return len(self.tokens) - self.num_prompt

    @property
    def target(self) -> int:
        """Tokens that exist, or will when the plans in flight commit."""
        return len(self.tokens) + self.pending

    @property
    def backlog(self) -> int:
        """Tokens to catch up by; 0 when the sequence will end by length with the plans in flight."""
        target = len(self.tokens) + self.pending
        return 0 if target >= self.limit else target - self.planned

    @property
    def lacking(self) -> int:
        """Tokens to compute before it can sample; while it waits, as far as can be known."""
        return self.backlog if self.state is State.RUNNING else max(1, len(self.tokens) - self.expected)

    @property
    def left(self) -> int:
        """The same, counting what plans in flight compute as still to do; 1 while it decodes."""
        if self.state is State.RUNNING:
            return len(self.tokens) - self.computed
        return 1 if self.state is State.FOLLOWING else max(1, len(self.tokens) - self.expected)

    @property
    def wants_prompt_logprobs(self) -> bool:
        return self.params.prompt_logprobs is not None and self.num_outputs == 0

    def delta(
        self,
        token_ids: list[int],
        *,
        logprobs: list[TokenLogprobs] | None = None,
        prompt_logprobs: list[TokenLogprobs | None] | None = None,
        finish_reason: FinishReason | None = None,
        stop_reason: int | None = None,
        error: str | None = None,
        invalid: bool = False,
        timings: Timings | None = None,
    ) -> Delta:
        """Of its last tokens, which it has already."""
        return Delta(
            request_id=self.request.request_id,
            attempt=self.attempt,
            index=self.num_outputs - len(token_ids),
            token_ids=token_ids,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            num_cached_tokens=self.cached,
            finish_reason=finish_reason,
            stop_reason=stop_reason,
            error=error,
            invalid=invalid,
            timings=timings,
        )
