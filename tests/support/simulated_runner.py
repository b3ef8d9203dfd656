"""SimulatedRunner: an executor without a model, which notices every block used too early, too late or by a wrong row.

Instead of keys and values, a KV slot keeps a hash of all tokens up to its position. Before a row computes tokens, its
whole context must be found that way through its block table; so a block freed too early, a lost remap, a stale row or
a prefix of another tenant fails at once. The next token is a function of that hash and the seed only, which makes the
output of a request the same whatever else runs: `reference_output` computes it without any scheduler.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass

from kllm.request import FinishReason, Request, SamplingParams, TokenLogprobs
from kllm.scheduling.plan import Late, NewRow, Plan, RowResult, RowStep, StepResult

_MASK = (1 << 64) - 1
EMPTY = -1  # what a slot holds before anything is written


def start_hash(salt: str, adapter: str) -> int:
    """Hash of the empty prefix: KV of different tenants differs from the first token on."""
    return int.from_bytes(hashlib.blake2b(f"{salt}\0{adapter}".encode(), digest_size=8).digest())


def extend_hash(prefix: int, token: int) -> int:
    return (prefix * 6364136223846793005 + token + 1442695040888963407) & _MASK


def draw(prefix: int, seed: int, vocab_size: int, allowed: Callable[[int], bool] | None = None) -> int:
    """The token sampled after a prefix."""
    number = extend_hash(extend_hash(prefix, seed), 0x9E3779B9) >> 16
    if allowed is None:
        return number % vocab_size
    choices = [token for token in range(vocab_size) if allowed(token)]
    return choices[number % len(choices)]


def mask_allows(mask: bytes) -> Callable[[int], bool]:
    """A grammar mask as plan.Late states it."""
    bits = int.from_bytes(mask, "little")
    return lambda token: bool(bits >> token & 1)


def grammar_mask(num_outputs: int, vocab_size: int, eos: int) -> bytes:
    """The toy grammar of the tests: outputs at even places are even tokens, at odd places odd ones; EOS anywhere."""
    bits = sum(1 << token for token in range(vocab_size) if token % 2 == num_outputs % 2 or token == eos)
    return bits.to_bytes(4 * -(-vocab_size // 32), "little")


def reference_output(
    request: Request, *, vocab_size: int, eos: int, length: int
) -> tuple[list[int], FinishReason, int | None]:
    """(tokens, finish reason, stop token) of a request that runs alone. length: most tokens, prompt included."""
    params = request.params
    prefix = start_hash(request.cache_salt, request.adapter)
    for token in request.prompt_token_ids:
        prefix = extend_hash(prefix, token)
    room = length - len(request.prompt_token_ids)
    most = room if params.max_tokens is None else min(room, params.max_tokens)
    structured = params.structured_outputs is not None
    outputs: list[int] = []
    while True:
        mask = grammar_mask(len(outputs), vocab_size, eos) if structured else None
        token = draw(prefix, params.seed or 0, vocab_size, mask_allows(mask) if mask else None)
        prefix = extend_hash(prefix, token)
        outputs.append(token)
        if len(outputs) >= params.min_tokens:
            if token == eos and (structured or not params.ignore_eos):
                return outputs, "stop", None
            if token in params.stop_token_ids:
                return outputs, "stop", token
        if len(outputs) == most:
            return outputs, "length", None


class Row:
    """What the runner keeps of a request from NewRow until `ended`. hashes[i]: of tokens[: i + 1]."""

    def __init__(self, new: NewRow, start: int) -> None:
        self.request_id = new.request_id
        self.num_prompt = new.num_prompt
        self.params: SamplingParams = new.params
        self.seed = new.seed
        self.blocks = list(new.blocks)
        self.position = new.start
        self.tokens: list[int] = []
        self.hashes: list[int] = []
        self._start = start
        for token in new.tokens:
            self.append(token)

    @property
    def last_hash(self) -> int:
        return self.hashes[-1] if self.hashes else self._start

    def append(self, token: int) -> None:
        self.hashes.append(extend_hash(self.last_hash, token))
        self.tokens.append(token)


@dataclass
class Job:
    """A step as submitted: the block table is that of its plan, whatever later plans change."""

    row: Row
    step: RowStep
    blocks: list[int]
    start: int

    def written(self, block_tokens: int) -> list[int]:
        last = self.start + self.step.count - 1
        return self.blocks[self.start // block_tokens : last // block_tokens + 1]


class SimulatedRunner:
    """The Executor port. Nothing runs until advance(), which completes the oldest plan.

    tenant: request id -> (salt, adapter), which plans do not carry. committed() tells which plans the scheduler has
    committed: a block that an uncommitted plan names must not be given to another row.
    """

    def __init__(
        self,
        num_blocks: int,
        block_tokens: int,
        *,
        vocab_size: int,
        depth: int = 1,
        tenant: Callable[[str], tuple[str, str]] = lambda request_id: ("", ""),
    ) -> None:
        self.depth = depth
        self.vocab_size = vocab_size
        self.rows: dict[int, Row] = {}
        self.tokens_computed = 0
        self.tokens_skipped = 0
        self._tenant = tenant
        self._block_tokens = block_tokens
        self._slots = [EMPTY] * (num_blocks * block_tokens)
        self._waiting: deque[tuple[Plan, list[Job], Future[StepResult]]] = deque()
        self._uncommitted: deque[tuple[int, list[Job]]] = deque()
        self._late: dict[int, Late] = {}
        self._last_plan = -1

    # -- the Executor port -----------------------------------------------------------------------------------

    def submit(self, plan: Plan) -> Future[StepResult]:
        assert plan.id > self._last_plan, "plans out of order"
        assert len(self._uncommitted) < self.depth, "more plans in flight than the executor takes"
        self._last_plan = plan.id
        for row in plan.ended:
            del self.rows[row]
        for new in plan.new:
            assert new.row not in self.rows, f"row {new.row} is taken"
            assert new.start % self._block_tokens == 0
            assert len(set(new.blocks)) == len(new.blocks)
            self.rows[new.row] = Row(new, start_hash(*self._tenant(new.request_id)))
        for number, index, block in plan.remaps:
            self.rows[number].blocks[index] = block
        assert len({step.row for step in plan.steps}) == len(plan.steps), "a row has two steps"
        assert {new.row for new in plan.new} <= {step.row for step in plan.steps}, "a new row without a step"
        jobs = [self._job(step) for step in plan.steps]
        self._check_fences(jobs)
        future: Future[StepResult] = Future()
        self._waiting.append((plan, jobs, future))
        self._uncommitted.append((plan.id, jobs))
        return future

    def bind(self, plan_id: int, late: Late) -> None:
        assert plan_id not in self._late
        assert any(plan.id == plan_id and plan.needs_bind for plan, _, _ in self._waiting)
        self._late[plan_id] = late

    def close(self) -> None:
        while self._waiting:
            self.advance()

    # -- what a test calls -----------------------------------------------------------------------------------

    def advance(self) -> StepResult:
        """Execute the oldest plan, complete its future and return its result."""
        plan, jobs, future = self._waiting.popleft()
        late = self._late.pop(plan.id) if plan.needs_bind else Late()
        result = StepResult(plan.id)
        for job in jobs:
            result.rows[job.step.row] = self._execute(job, late)
        future.set_result(result)
        return result

    def committed(self, plan_id: int) -> None:
        first, _ = self._uncommitted.popleft()
        assert first == plan_id

    # -- inside ----------------------------------------------------------------------------------------------

    def _job(self, step: RowStep) -> Job:
        row = self.rows[step.row]
        assert step.count > 0
        assert step.skip >= 0
        assert not set(step.blocks) & set(row.blocks), "a block was sent twice"
        row.blocks += step.blocks
        start = row.position + step.skip
        row.position = start + step.count
        assert row.position <= len(row.blocks) * self._block_tokens, "tokens without a block"
        return Job(row, step, row.blocks.copy(), start)

    def _check_fences(self, jobs: list[Job]) -> None:
        written: set[int] = set()
        for job in jobs:
            own = job.written(self._block_tokens)
            assert not written & set(own), "two rows of a plan write to one block"
            written |= set(own)
            for plan_id, earlier in self._uncommitted:
                for other in earlier:
                    overlap = set() if other.row is job.row else set(own) & set(other.blocks)
                    assert not overlap, f"blocks {overlap} are written though uncommitted plan {plan_id} names them"

    def _execute(self, job: Job, late: Late) -> RowResult:
        row, step = job.row, job.step
        end = job.start + step.count
        self._check_context(job)
        for position in range(job.start, end):
            block = job.blocks[position // self._block_tokens]
            self._slots[block * self._block_tokens + position % self._block_tokens] = row.hashes[position]
        self.tokens_computed += step.count
        self.tokens_skipped += step.skip
        result = RowResult(prompt_logprobs=self._prompt_logprobs(row, job.start, end))
        assert step.sample == (end == len(row.tokens)), "sampling belongs to the last token known"
        assert step.bind == (step.sample and row.params.structured_outputs is not None)
        if step.sample:
            mask = late.masks.get(step.row) if step.bind else None
            allowed = mask_allows(mask) if mask is not None else None
            result.token = draw(row.last_hash, row.seed, self.vocab_size, allowed)
            if row.params.logprobs is not None:
                result.logprobs = TokenLogprobs(result.token, -1.0, 1)
            row.append(result.token)
        return result

    def _check_context(self, job: Job) -> None:
        width = self._block_tokens
        held: list[int] = []
        for block in job.blocks[: -(-job.start // width)]:
            held += self._slots[block * width : (block + 1) * width]
        if held[: job.start] != job.row.hashes[: job.start]:
            wrong = next(i for i in range(job.start) if held[i] != job.row.hashes[i])
            block = job.blocks[wrong // width]
            raise AssertionError(f"{job.row.request_id}: block {block} does not hold the KV of position {wrong}")

    def _prompt_logprobs(self, row: Row, start: int, end: int) -> list[TokenLogprobs] | None:
        """Of the prompt tokens after those computed here."""
        if row.params.prompt_logprobs is None or start >= row.num_prompt:
            return None
        successors = range(start + 1, min(end + 1, row.num_prompt))
        return [TokenLogprobs(row.tokens[i], -float(i), 1) for i in successors]
