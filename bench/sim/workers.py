"""A worker, simulated: the real machine of the client's round, and virtual reads instead of an executor."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import numpy as np
from bench.sim.assumptions import Assumptions
from bench.sim.events import Events
from bench.sim.following import Follow
from bench.sim.links import Link, Network
from bench.sim.progress import Progress
from bench.sim.reads import Read
from bench.sim.session import Session
from bench.sim.shapes import Shape, blob

from tensorhub_core.client.machine import step
from tensorhub_core.client.moves import lease_of
from tensorhub_core.client.promised import Promised
from tensorhub_core.client.reading import ReadEnd, ReadOutcome
from tensorhub_core.client.rounds import (
    Abandon,
    Advance,
    Answered,
    Ask,
    Begin,
    Effect,
    End,
    Event,
    Mode,
    Plan,
    Planned,
    Pushed,
    ReadEnded,
    Reopened,
    RoundState,
    Settle,
    Settled,
    Stop,
    Tell,
    Withdraw,
    Withdrawn,
)
from tensorhub_core.client.rounds import Read as ReadEffect
from tensorhub_core.layout.canonical import digest_of
from tensorhub_core.state.messages import (
    Announce,
    Available,
    Done,
    Ended,
    Filling,
    GetBlob,
    Held,
    Publish,
    PutBlob,
    Register,
    Reply,
    Unpublish,
    Wait,
    Welcome,
)

Peers = dict[bytes, "Worker"]
"""By the digest of their placement."""
_NO_READS = np.zeros(0, np.bool_)


class _Book(set[bytes]):
    """The digests of the blobs that a worker knows."""

    def learn(self, blobs: Iterable[bytes]) -> None:
        """Know blobs that came with a promise."""
        self.update(map(digest_of, blobs))


@dataclass(eq=False)
class Worker:
    """One GPU's process, or a seed agent's.

    `out` and `into` are the directions of its network card, `bus` those of the way to its host's neighbours.
    """

    events: Events
    network: Network
    assumptions: Assumptions
    session: Session
    shape: Shape
    peers: Peers
    path: Callable[[Worker, Worker], tuple[Link, ...]]
    out: Link
    into: Link
    bus: tuple[Link, Link]
    alive: bool = True
    key: tuple[int, int] | None = None
    published: bool = False
    sources: list[tuple[float, str, str]] = field(default_factory=list)
    """(when, replica, zone) of the sources it began to read from."""
    _placement: PutBlob | None = None
    _from: list[tuple[Worker, Follow]] = field(default_factory=list)
    _known: _Book = field(default_factory=lambda: _Book())
    _promised: Promised = field(init=False)
    _next_round: int = 0
    _round: RoundState | None = None
    _ended: Callable[[End], None] | None = None
    _read: Read | None = None
    _done: float = 0.0
    _life: int = 0
    _content: bytes = b""
    _waits: Callable[[int], None] | None = None

    def __post_init__(self) -> None:
        self.progress = Progress(self.events, self.assumptions, self.shape, self._announce, self._entered)

    # --- what its owner asks for ------------------------------------------------------------------------------------

    def connect(self, ready: Callable[[], None]) -> None:
        """Say hello and register memory."""
        place = self.placement
        self.peers[place.digest] = self
        register = Register(self.shape.layout.digest, place.digest, self.shape.total_bytes, self.shape.segments)
        self._known.add(self.shape.layout.digest)
        self.session.blobs, self.session.register = (self.shape.layout, place), register

        def welcomed() -> None:
            for each in self.session.blobs:
                self.session.tell(each)
            self.session.ask(register, lambda _: ready())

        self.session.open(welcomed)

    @property
    def name(self) -> str:
        """Return which shard of which replica it is."""
        return f"{self.session.identity.replica}/{self.session.identity.shard}"

    @property
    def placement(self) -> PutBlob:
        """Return where its memory lies."""
        if self._placement is None:
            self._placement = blob(f"placement of {self.name}".encode().ljust(256, b"."))
        return self._placement

    def publish(self, version: int, done: Callable[[], None]) -> None:
        """Create a version."""
        sums = self.shape.sums(version)
        self.session.tell(sums)

        def answered(reply: Reply) -> None:
            self._hold((reply.epoch, version), True)  # type: ignore[union-attr]
            self.session.created = self.key
            done()

        self.session.ask(Publish(version, sums.digest), answered)

    def unpublish(self, done: Callable[[], None]) -> None:
        """Take the copy back."""
        self.session.held, self.published = None, False

        def ended(_: Reply) -> None:
            self.progress.clear()
            done()

        self.session.ask(Unpublish(), ended, durable=True)

    def update(self, ended: Callable[[End], None], mode: Mode = "update") -> None:
        """Get the newest version."""
        assert self._round is None, f"{self.name} is in a round already"
        state = RoundState(self._next_round, None, mode, self.key, True, None, self.published)
        self._round, self._ended, self._done, self._content = state, ended, 0.0, b""
        self.progress.start()
        self._promised = Promised(self._known)  # type: ignore[arg-type]
        self._feed(Begin())

    def wait(self, heard: Callable[[int], None]) -> None:
        """Hear of the next version."""
        self._waits = heard

        def answered(reply: Reply) -> None:
            if isinstance(reply, Available) and self._waits is not None:
                self._waits = None
                heard(reply.number)

        self.session.ask(Wait(self.session.high), answered, durable=True)

    def kill(self) -> None:
        """End the process, from one moment to the next."""
        self.alive = self.session.alive = False
        if self._read is not None:
            self._read.stop()
        self.progress.clear()
        for follow in list(self.progress.followers):
            follow.lost()

    # --- the round --------------------------------------------------------------------------------------------------

    def on_push(self, message: Reply) -> None:
        """Hear what the hub says unasked."""
        self._feed(Pushed(message))

    def on_reopened(self, welcome: Welcome) -> None:
        """Hear of a new welcome."""
        self._life += 1
        self.progress.life = self._life
        if self._round is not None:
            self._feed(Reopened(welcome))
            self.progress.see_to_it()
        else:
            self._next_round = welcome.next_round

    def _feed(self, event: Event) -> None:
        if self._round is None or not self.alive:
            return
        state = self._round
        _, effects = step(state, event, self.events.now)
        for effect in effects:
            self._carry_out(state, effect)

    def _later(self, delay_s: float, state: RoundState, event: Callable[[], Event]) -> None:
        def happen() -> None:
            if self._round is state:
                self._feed(event())

        self.events.later(delay_s, happen)

    def _carry_out(self, state: RoundState, effect: Effect) -> None:
        match effect:
            case Ask(asked, message):
                if isinstance(message, Done) and not self._promised.names(self._sums(state).digest, self._life):
                    self.session.tell(self._sums(state))
                self.session.ask(message, lambda reply: self._answer(state, asked, reply))
            case Tell(message):
                if isinstance(message, Filling):
                    self.progress.announcing.begin()
                self.session.tell(message)
            case Plan(keep):
                self._plan(state, keep)
            case Withdraw():
                self.unpublish(lambda: self._later(0.0, state, Withdrawn))
            case ReadEffect():
                self._begin(state)
            case Advance(lease, prefix, whole):
                self._advance(lease, prefix, whole)
            case Abandon(lease, reason, kind):
                self._fail(state, lease, kind, reason)
            case Stop():
                self._stop(state, ReadOutcome(ReadEnd.CANCELLED, _NO_READS, self._bytes()))
            case Settle():
                digest = self._sums(state).digest
                self._later(self.assumptions.settle_s.value, state, lambda: Settled(digest))
            case End():
                self._conclude(state, effect)

    def _answer(self, state: RoundState, asked: int, reply: Reply) -> None:
        if self._round is state:
            self._promised.hear(reply, self._life)
            self._feed(Answered(asked, reply))

    def _sums(self, state: RoundState) -> PutBlob:
        return self.shape.sums(state.key[1] if state.key is not None else -1)

    def _plan(self, state: RoundState, keep: bool) -> None:
        """Get what is not known of the sources, then the plan stands."""
        content = state.sources[0].sums
        if not keep or content != self._content:
            self._done, self.progress.verified = 0.0, 0
        self._content = content
        self.progress.announcing.begin()
        wanted = [d for s in state.sources for d in (s.layout, s.placement, s.sums) if d and d not in self._known]
        missing = set(wanted)

        def got(digest: bytes) -> None:
            self._known.add(digest)
            missing.discard(digest)
            if not missing:
                self._later(self.assumptions.plan_s.value, state, Planned)

        for digest in dict.fromkeys(wanted):
            self.session.ask(GetBlob(digest), lambda _, digest=digest: got(digest))  # type: ignore[misc]
        if not missing:
            self._later(self.assumptions.plan_s.value, state, Planned)

    def _limit(self, prefix: int, whole: bool) -> float:
        return float(self.shape.total_bytes if whole else prefix * self.shape.segment_bytes)

    def _begin(self, state: RoundState) -> None:
        """Read what is missing from all sources."""
        read = Read(self.events, self.network, float(self.shape.total_bytes), lambda: self._all_here(state))
        read.done, self._read = self._done, read
        dead: list[str] = []
        for source in state.sources:
            peer = self.peers[source.placement]
            lease = lease_of(state, source.lease)
            limit = self._limit(state.prefixes.get(source.lease, 0), source.lease in state.whole)
            part = read.add(lease, self.path(peer, self), limit)
            word = functools.partial(peer.progress.word, source.sums)
            lost = functools.partial(self.source_died, lease)
            looks = self.assumptions.looks.value and limit < self.shape.total_bytes
            segment_bytes, away_s = self.shape.segment_bytes, self._away_s(peer)
            follow = Follow(self.events, read, lease, part, word, segment_bytes, away_s, lost, looks)
            peer.progress.followers.append(follow)
            self._from.append((peer, follow))
            self.sources.append((self.events.now, source.replica, peer.session.identity.place.zone))
            if not peer.alive:
                dead.append(lease)
        read.begin()
        self.progress.begin(read, state.sources[0].sums)
        for lease in dead:
            self.source_died(lease)

    def _away_s(self, peer: Worker) -> float:
        """Return how long a message to a peer takes."""
        here, there = self.session.identity.place.zone, peer.session.identity.place.zone
        return self.assumptions.latency_s.value + (self.assumptions.wan_latency_s.value if here != there else 0.0)

    def _advance(self, lease: str, prefix: int, whole: bool) -> None:
        if self._read is not None:
            self._read.advance(lease, self._limit(prefix, whole))

    def source_died(self, lease: str) -> None:
        """Get nothing from a source any more, and notice it."""
        read, state = self._read, self._round
        if read is None or state is None:
            return
        read.lose(lease)
        self.events.later(self.assumptions.lost_peer_s.value, self._notice, read, state, lease)

    def _notice(self, read: Read, state: RoundState, lease: str) -> None:
        if self._read is read:
            self._fail(state, lease, "lost", "the connection is lost")

    def _fail(self, state: RoundState, lease: str, kind: str, detail: str) -> None:
        self._stop(state, ReadOutcome(ReadEnd.SOURCE_FAILED, _NO_READS, self._bytes(), lease, kind, detail))

    def _stop(self, state: RoundState, outcome: ReadOutcome) -> None:
        """End the read; what was in flight is lost, what is verified stays."""
        read = self._read
        if read is None:
            return
        read.stop()
        self.progress.end(whole=False)
        self._done = min(read.done, self._limit(self.progress.verified, False))
        self._leave_sources()
        self._later(0.0, state, lambda: ReadEnded(outcome))

    def _leave_sources(self) -> None:
        self._read = None
        for peer, follow in self._from:
            follow.end()
            peer.progress.followers.remove(follow)
        self._from = []

    def _bytes(self) -> int:
        return int(self._read.count()) if self._read is not None else int(self._done)

    def _all_here(self, state: RoundState) -> None:
        """Take the end of the read: everything is verified soon after."""
        read = self._read
        assert read is not None
        self._done = read.done
        self.progress.end(whole=True)
        self._leave_sources()
        self._later(0.0, state, lambda: ReadEnded(ReadOutcome(ReadEnd.VERIFIED, _NO_READS, self.shape.total_bytes)))

    def _conclude(self, state: RoundState, end: End) -> None:
        self._next_round, self._round = state.number + 1, None
        self.session.ended = Ended(state.number, None if end.error is not None else end.key)
        self._leave_sources()
        if end.error is None and end.key is not None:
            self._hold(end.key, end.published or end.held)
        elif end.dirty:
            self.progress.clear()
            self.key, self.session.held, self.published = None, None, False
        ended, self._ended = self._ended, None
        if ended is not None:
            ended(end)

    def _hold(self, key: tuple[int, int], published: bool) -> None:
        self.key, self.published = key, published
        shape, sums = self.shape, self.shape.sums(key[1])
        self._known.add(sums.digest)
        self.session.blobs = (shape.layout, self.placement, sums)
        place = self.placement.digest
        held = Held(*key, shape.layout.digest, place, sums.digest, shape.total_bytes, shape.segments)
        self.session.held = held if published else None

    # --- announcements ----------------------------------------------------------------------------------------------

    def _entered(self) -> bool:
        return self._round is not None and self._round.entered and self.alive

    def _announce(self, figures: tuple[int, int], answered: Callable[[Reply], None]) -> None:
        if self._round is not None:
            self.session.ask(Announce(self._round.number, *figures), answered)
