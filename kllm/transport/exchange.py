"""Exchange: between one instance and any number of gateways, so that the instance sees one Link.

    gateway a ──┐  ids "r"           ids "1:r"
    gateway b ──┼── Peers ── Exchange ── Link ── instance
    gateway c ──┘                    "2:r"

Names that gateways choose (of requests, of questions) get the gateway's number in front, so that they never meet, and
lose it again on the way back. What an instance reports of itself goes to all; progress, to each gateway its own.
"""

from __future__ import annotations

import logging
from typing import NamedTuple

import msgspec
from msgspec.structs import replace

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
    SetGrade,
    Starting,
    Submit,
    Up,
    WatchCache,
)
from kllm.request import Delta
from kllm.transport.peers import PeerKey

logger = logging.getLogger(__name__)

LEASE_REPORTS = 30  # the instance's reports, one a second, without a word from a gateway before it counts as gone
MOST_GATEWAYS = 64


class Turn(NamedTuple):
    """What follows from one event. down: for the instance. up: for gateways."""

    down: list[Down]
    up: list[tuple[PeerKey, Up]]


class Peer(msgspec.Struct):
    """One gateway's connection. quiet: reports since it said something. answered: it has said something after Hello.
    watching: it wants CacheDeltas. wants_dump: it has asked for a CacheDump that has not come. grade: what it wants.
    attempts: requests that it has here, with their attempt."""

    key: PeerKey
    number: int
    quiet: int = 0
    answered: bool = False
    watching: bool = False
    wants_dump: bool = False
    grade: int = 0
    attempts: dict[str, int] = {}


class Exchange:
    """Who said what goes where. Pure: no sockets, no clock; time passes with the instance's reports.

    A gateway joins with its first message, and is gone with `lost`, with Drain (for an instance that serves several, it
    means that this gateway leaves), or when it has been silent for lease_reports reports: its requests are aborted, and
    those of others go on. One that comes back after that joins anew, under another number: nothing of what it had is
    mistaken for what it has.
    """

    def __init__(self, lease_reports: int = LEASE_REPORTS, most: int = MOST_GATEWAYS) -> None:
        self._lease_reports = lease_reports
        self._most = most
        self._peers: dict[PeerKey, Peer] = {}
        self._numbers: dict[str, Peer] = {}  # as written in front of ids
        self._joined = 0
        self._hello: Hello | None = None
        self._starting: Starting | None = None
        self._leaving = False

    @property
    def gateways(self) -> int:
        return len(self._peers)

    def requests(self, key: PeerKey) -> dict[str, int]:
        """What this gateway has here, by its own ids: the attempt."""
        return self._peers[key].attempts if key in self._peers else {}

    # -- from gateways ---------------------------------------------------------------------------------------

    def heard(self, key: PeerKey, message: Down) -> Turn:
        turn = Turn([], [])
        peer = self._peers.get(key)
        if peer is None:
            peer = self._join(key, turn)
            if peer is None:
                return turn
        elif self._hello is not None:
            peer.answered = True
        peer.quiet = 0
        match message:
            case Ping():
                pass
            case Drain():
                turn.up.append((key, Drained()))
                turn.down.extend(self.lost(key).down)
            case Submit(request=request):
                peer.attempts[request.request_id] = message.attempt
                leader = None if request.leader is None else _with(peer, request.leader)
                named = replace(request, request_id=_with(peer, request.request_id), leader=leader)
                turn.down.append(replace(message, request=named))
            case Abort():
                self._forget(peer, message)
                turn.down.append(replace(message, request_ids=[_with(peer, each) for each in message.request_ids]))
            case ClearCache():
                turn.down.append(replace(message, token=_with(peer, message.token)))
            case SetGrade():
                peer.grade = message.grade
                turn.down.append(SetGrade(grade=self._grade))
            case WatchCache():
                peer.watching = peer.wants_dump = True
                turn.down.append(message)
            case _:  # Release, SetRole: leases are the instance's own names, and of several roles the last term holds
                turn.down.append(message)
        return turn

    def _join(self, key: PeerKey, turn: Turn) -> Peer | None:
        if len(self._peers) >= self._most:
            turn.up.append((key, Failed(error=f"the instance has {self._most} gateways already")))
            return None
        self._joined += 1
        peer = self._peers[key] = self._numbers[str(self._joined)] = Peer(key, self._joined)
        logger.info("gateway %d joins (%d now)", peer.number, len(self._peers))
        greeting = self._hello or self._starting
        if greeting is not None:
            turn.up.append((key, greeting))
        if self._leaving:
            turn.up.append((key, Leaving()))
        return peer

    @staticmethod
    def _forget(peer: Peer, abort: Abort) -> None:
        for request_id in abort.request_ids:
            held = peer.attempts.get(request_id)
            if held is not None and (abort.attempt is None or held <= abort.attempt):
                del peer.attempts[request_id]

    def lost(self, key: PeerKey) -> Turn:
        """This gateway is gone. Not known: nothing follows."""
        peer = self._peers.pop(key, None)
        if peer is None:
            return Turn([], [])
        del self._numbers[str(peer.number)]
        logger.info("gateway %d is gone with %d requests here", peer.number, len(peer.attempts))
        ids = [_with(peer, request_id) for request_id in peer.attempts]
        down: list[Down] = [Abort(request_ids=ids)] if ids else []
        if peer.grade > self._grade:
            down.append(SetGrade(grade=self._grade))
        return Turn(down, [])

    @property
    def _grade(self) -> int:
        """What the instance is to have: the highest that a gateway wants."""
        return max((peer.grade for peer in self._peers.values()), default=0)

    # -- from the instance -----------------------------------------------------------------------------------

    def said(self, message: Up) -> Turn:
        match message:
            case Deltas():
                return Turn([], self._deltas(message))
            case EngineLoad():
                return self._load(message)
            case PrefillDone():
                return Turn([], self._prefill_done(message))
            case CacheCleared():
                peer, token = self._owner(message.token)
                return Turn([], [] if peer is None else [(peer.key, replace(message, token=token))])
            case CacheDelta():
                return Turn([], [(peer.key, message) for peer in self._peers.values() if peer.watching])
            case CacheDump():
                asked = [peer for peer in self._peers.values() if peer.wants_dump]
                for peer in asked:
                    peer.wants_dump = False
                return Turn([], [(peer.key, message) for peer in asked])
            case Hello():
                return self._greet(message)
            case Starting():
                self._starting = message
            case Leaving():
                self._leaving = True
        return self._to_all(message)

    def _to_all(self, message: Up) -> Turn:
        return Turn([], [(key, message) for key in self._peers])

    def _greet(self, hello: Hello) -> Turn:
        """The instance repeats it until it hears something; gateways that have answered know it."""
        self._hello = hello
        return Turn([], [(peer.key, hello) for peer in self._peers.values() if not peer.answered])

    def _deltas(self, message: Deltas) -> list[tuple[PeerKey, Up]]:
        items: dict[PeerKey, list[Delta]] = {}
        for delta in message.items:
            peer, request_id = self._owner(delta.request_id)
            if peer is None:
                continue  # of a gateway that is gone
            items.setdefault(peer.key, []).append(replace(delta, request_id=request_id))
            if delta.finish_reason is not None:
                self._ended(peer, request_id, delta.attempt)
        return [(key, Deltas(items=own)) for key, own in items.items()]

    def _prefill_done(self, message: PrefillDone) -> list[tuple[PeerKey, Up]]:
        peer, request_id = self._owner(message.request_id)
        if peer is None:
            return []
        self._ended(peer, request_id, message.attempt)
        return [(peer.key, replace(message, request_id=request_id))]

    @staticmethod
    def _ended(peer: Peer, request_id: str, attempt: int) -> None:
        if peer.attempts.get(request_id, attempt + 1) <= attempt:
            del peer.attempts[request_id]

    def _load(self, load: EngineLoad) -> Turn:
        if self._hello is not None and (load.role, load.term) != (self._hello.role, self._hello.term):
            self._hello = replace(self._hello, role=load.role, term=load.term)  # for those that join from now on
        if load.progress is None:
            return Turn([], [(peer.key, self._seen_by(peer, load)) for peer in self._peers.values()])
        turn = Turn([], [])
        self._end_leases(turn)
        own: dict[PeerKey, dict[str, tuple[int, int]]] = {key: {} for key in self._peers}
        for name, held in load.progress.items():
            peer, request_id = self._owner(name)
            if peer is not None:
                own[peer.key][request_id] = held
        for peer in self._peers.values():
            if self._hello is not None and not peer.answered:
                turn.up.append((peer.key, self._hello))
            turn.up.append((peer.key, replace(self._seen_by(peer, load), progress=own[peer.key])))
        return turn

    def _seen_by(self, peer: Peer, load: EngineLoad) -> EngineLoad:
        """Where the instance has the highest grade, each gateway has got what it wanted."""
        if load.grade == peer.grade or load.grade != self._grade:
            return load
        return replace(load, grade=peer.grade)

    def _end_leases(self, turn: Turn) -> None:
        for peer in list(self._peers.values()):
            peer.quiet += 1
            if peer.quiet > self._lease_reports:
                logger.warning("gateway %d has been silent for %d s", peer.number, self._lease_reports)
                turn.down.extend(self.lost(peer.key).down)

    def _owner(self, name: str) -> tuple[Peer | None, str]:
        number, _, own = name.partition(":")
        return self._numbers.get(number), own


def _with(peer: Peer, name: str) -> str:
    return f"{peer.number}:{name}"
