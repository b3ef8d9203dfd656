"""What a gateway and an instance say to each other. Versioned; encoded as msgpack, never pickle.

Down (gateway to instance): Submit, Abort, Release, SetRole, SetGrade, Drain, Ping, ClearCache,
WatchCache.
Up (instance to gateway): Starting, Hello, Deltas, PrefillDone, EngineLoad, CacheDelta, CacheDump, CacheCleared,
Leaving, Drained, Failed.
Messages carry durations and ages, never timestamps: every node has its own clock.

A link may lose, repeat or reorder messages. (attempt, index) in a Delta and the attempt in Submit and Abort make
repeated and late ones harmless; Hello is repeated until it is answered; what an instance holds (EngineLoad.progress) is
compared with what the gateway gave it, so that lost ones are noticed.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from kllm.request import Delta, Request
from kllm.telemetry.tier_counts import TierCounts

PROTOCOL_VERSION = 5

Role = Literal["both", "prefill", "decode"]


class Message(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Base of everything that travels over a Link."""


class KvSource(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """KV of a prompt's leading whole blocks, held by the instance that computed it until the lease is released or over.

    lease: its name there. address: how its memory is reached: shm:NAME on its host, or mooncake:HOST:PORT:BASE.
    page_bytes: of one block. slots: the page of each block, in order. checksums: of each page's bytes.
    """

    lease: str
    address: str
    page_bytes: int
    slots: list[int]
    checksums: list[int]


class Submit(Message, frozen=True, kw_only=True, omit_defaults=True, tag="submit"):
    """Run this request. `outputs` are tokens already given to the client by an earlier attempt:
    the instance continues after them as if it had sampled them itself. `attempt` grows with every submission of an id:
    an instance ignores one that is not above the highest it has seen.

    prefill_only: end after the next token, and answer with PrefillDone unless the request has ended with it.
    kv: where to get KV of prompt and outputs from, instead of computing it."""

    request: Request
    outputs: list[int] = []
    attempt: int = 0
    prefill_only: bool = False
    kv: KvSource | None = None


class Abort(Message, frozen=True, kw_only=True, omit_defaults=True, tag="abort"):
    """Stop these requests and free what they hold. Unknown ids are ignored. No delta follows.

    attempt: requests that are here in a later attempt stay. None: whatever the attempt."""

    request_ids: list[str]
    attempt: int | None = None


class Release(Message, frozen=True, kw_only=True, omit_defaults=True, tag="release"):
    """These leases (KvSource.lease) are not needed any more. Unknown ones are ignored."""

    leases: list[str]


class SetRole(Message, frozen=True, kw_only=True, omit_defaults=True, tag="set-role"):
    """What the instance is used for from now on. Of several such messages the one with the highest term holds: those
    with a term that is not above the last are ignored. Reported in every EngineLoad."""

    role: Role
    term: int


class SetGrade(Message, frozen=True, kw_only=True, omit_defaults=True, tag="set-grade"):
    """How short of capacity the fleet is (kllm.cluster.degradation): what the instance is to give up, from 0, nothing,
    to 3. Reported in every EngineLoad."""

    grade: int


class Drain(Message, frozen=True, kw_only=True, omit_defaults=True, tag="drain"):
    """Finish what is running, answer Drained, then exit. Nothing is submitted after this."""


class Ping(Message, frozen=True, kw_only=True, omit_defaults=True, tag="ping"):
    """Sign of life of the gateway, every second from Hello on. An instance that has had one and then hears nothing for
    as long as its lease ends, as if its link had closed."""


class ClearCache(Message, frozen=True, kw_only=True, omit_defaults=True, tag="clear-cache"):
    """Forget every cached prefix that no request uses, on the device and in host memory; with `store`, in the shared
    store too. Answered with CacheCleared."""

    token: str
    store: bool = False


class WatchCache(Message, frozen=True, kw_only=True, omit_defaults=True, tag="watch-cache"):
    """Say what is cached (CacheDump), and from then on what changes (CacheDelta). Asked again after a gap."""


class Starting(Message, frozen=True, kw_only=True, omit_defaults=True, tag="starting"):
    """Progress of a start: what is being done, and how much of it (0 to 1)."""

    phase: str
    fraction: float = 0.0


class Hello(Message, frozen=True, kw_only=True, omit_defaults=True, tag="hello"):
    """The instance is ready; repeated with every report until the gateway has said something.

    `incarnation` is new for every process start. chunk_tokens: most prompt tokens of one request in one step.
    operators: what computes, in words. fingerprint: of model and KV layout, where the names of blocks begin; "" if the
    instance does not report its cache. transfers: it can hand KV over (PrefillDone) and take it (Submit.kv).
    page_bytes: of one KV block, where it transfers. resumes: it can continue after given outputs token for token."""

    instance_id: str
    incarnation: str
    version: int = PROTOCOL_VERSION
    model: str = ""
    max_model_len: int = 0
    vocab_size: int = 0
    num_blocks: int = 0
    block_tokens: int = 0
    chunk_tokens: int = 0
    max_num_seqs: int = 0
    start_seconds: dict[str, float] = {}
    operators: str = ""
    fingerprint: str = ""
    role: Role = "both"
    term: int = 0
    transfers: bool = False
    page_bytes: int = 0
    resumes: bool = True


class Deltas(Message, frozen=True, kw_only=True, omit_defaults=True, tag="deltas"):
    """Outputs of one committed step."""

    items: list[Delta]


class PrefillDone(Message, frozen=True, kw_only=True, omit_defaults=True, tag="prefill-done"):
    """A request submitted with prefill_only has its token (in Deltas) and is not here any more. num_outputs: how many
    it has. kv: of prompt and outputs but the last; None: nothing of it can be handed over."""

    request_id: str
    attempt: int
    num_outputs: int
    kv: KvSource | None = None


class StepTimes(msgspec.Struct, frozen=True, array_like=True):
    """How long a step takes on this instance, fitted to its own steps; seconds, all at least 0:

        base + row * rows + new_token * tokens computed + context_token * KV entries read once for each row

    samples: steps that it was fitted to; the figures mean nothing with 0."""

    base: float = 0.0
    row: float = 0.0
    new_token: float = 0.0
    context_token: float = 0.0
    samples: int = 0


class EngineLoad(Message, frozen=True, kw_only=True, omit_defaults=True, tag="load"):
    """State after a step; counters are totals since this incarnation started.

    sequence: counts the reports of this incarnation, from 1 on; an older one that comes late is ignored. 0: no number.
    cache_sequence: of the latest CacheDelta, so that the loss of the last one is noticed too.
    progress: every request that the instance holds, by id: (attempt, index of the next delta). With the report of
    every second only; None in others.
    lacking: prompt tokens that requests here have to compute before they can sample. decoding: running requests that
    lack none. context: tokens whose KV running requests hold. oldest_wait_s: age of the oldest that has no token yet.
    """

    running: int = 0
    waiting: int = 0
    kv_usage: float = 0.0  # share of blocks that running requests hold, 0 to 1
    kv_cached: float = 0.0  # share of blocks that only the prefix tree holds
    preemptions: int = 0
    yields: int = 0  # times that a long prompt gave way to others
    quota_tokens: int = 0  # prompt tokens that long prompts computed before others, from their quota
    overtakes: int = 0  # admissions past a request that did not fit
    blocked: int = 0  # waiting requests that did not fit when they were tried last
    prefix_queries: int = 0  # tokens looked up in the prefix tree
    prefix_hits: int = 0  # tokens found there, those brought from lower tiers included
    l2_hits: int = 0  # tokens of them that were brought from host memory
    l3_hits: int = 0  # and from the store
    wasted: int = 0  # blocks brought and gone again when their request was admitted
    tiers: TierCounts | None = None  # None: there are no lower tiers
    events_sent: int = 0  # messages about the cache, whether or not anybody is subscribed
    events_dropped: int = 0  # batches of events that were given up
    steps: int = 0
    step_s: float = 0.0  # total duration of the steps so far
    lacking: int = 0
    decoding: int = 0
    context: int = 0
    oldest_wait_s: float = 0.0
    leases: int = 0  # held for others to pull from
    step_times: StepTimes | None = None
    role: Role = "both"
    term: int = 0
    grade: int = 0
    sequence: int = 0
    cache_sequence: int = 0
    progress: dict[str, tuple[int, int]] | None = None


class CacheChange(msgspec.Struct, frozen=True, array_like=True):
    """Blocks that are there now, or (stored False) are not any more. tier: 1 device, 2 host memory, 3 store.
    hashes: the last 8 bytes of each block's name (kllm.cache.block_hash), one after the other; none: every block of the
    tier."""

    tier: int
    stored: bool
    hashes: bytes


class CacheDelta(Message, frozen=True, kw_only=True, omit_defaults=True, tag="cache"):
    """What has changed in the instance's cache. sequence: counts these from 1 on; a gap means that one is lost."""

    sequence: int
    changes: list[CacheChange]


class CacheDump(Message, frozen=True, kw_only=True, omit_defaults=True, tag="cache-dump"):
    """What device and host memory of the instance hold, as after the CacheDelta of this sequence number."""

    sequence: int
    changes: list[CacheChange]


class CacheCleared(Message, frozen=True, kw_only=True, omit_defaults=True, tag="cache-cleared"):
    """The answer to the ClearCache of this token. complete: nothing is cached any more; else requests still use some.
    error: why the store could not be cleared."""

    token: str
    complete: bool
    error: str | None = None


class Leaving(Message, frozen=True, kw_only=True, omit_defaults=True, tag="leaving"):
    """The instance was told to end by somebody else: it finishes what it has, and is to get nothing more."""


class Drained(Message, frozen=True, kw_only=True, omit_defaults=True, tag="drained"):
    """Everything that was running has ended."""


class Failed(Message, frozen=True, kw_only=True, omit_defaults=True, tag="failed"):
    """The instance cannot start or go on; `error` is for the operator. The process exits after this."""

    error: str


Down = Submit | Abort | Release | SetRole | SetGrade | Drain | Ping | ClearCache | WatchCache
Up = (
    Starting
    | Hello
    | Deltas
    | PrefillDone
    | EngineLoad
    | CacheDelta
    | CacheDump
    | CacheCleared
    | Leaving
    | Drained
    | Failed
)

_encoder = msgspec.msgpack.Encoder()
_down = msgspec.msgpack.Decoder(Down)
_up = msgspec.msgpack.Decoder(Up)


def encode(message: Message) -> bytes:
    return _encoder.encode(message)


def decode_down(data: bytes) -> Down:
    """Raises msgspec.DecodeError or msgspec.ValidationError on anything that is not a Down message."""
    try:
        return _down.decode(data)
    except RecursionError as error:
        raise msgspec.DecodeError(f"nested too deeply: {error}") from error


def decode_up(data: bytes) -> Up:
    """Raises msgspec.DecodeError or msgspec.ValidationError on anything that is not an Up message."""
    try:
        return _up.decode(data)
    except RecursionError as error:
        raise msgspec.DecodeError(f"nested too deeply: {error}") from error
