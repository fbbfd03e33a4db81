"""A worker, simulated: the real machine of the client's round, and virtual reads instead of an executor."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from bench.sim.assumptions import Assumptions
from bench.sim.events import Events
from bench.sim.links import Link, Network
from bench.sim.reads import Read, pause_between
from bench.sim.session import Session
from bench.sim.shapes import Shape, blob

from tensorhub_core.client.announcing import Announcing
from tensorhub_core.client.machine import step
from tensorhub_core.client.moves import lease_of
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
from tensorhub_core.state.messages import (
    Announce,
    Available,
    Done,
    Ended,
    Filling,
    GetBlob,
    Held,
    Ok,
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
    announced: int = 0
    readers: list[tuple[Worker, str]] = field(default_factory=list)
    """Who reads from this worker's memory now, and under which lease."""
    _placement: PutBlob | None = None
    _from: list[Worker] = field(default_factory=list)
    _known: set[bytes] = field(default_factory=set)
    _next_round: int = 0
    _round: RoundState | None = None
    _ended: Callable[[End], None] | None = None
    _read: Read | None = None
    _done: float = 0.0
    _verified: int = 0
    _announcing: Announcing = field(default_factory=Announcing)
    _life: int = 0
    _looks: bool = False

    _content: bytes = b""
    _waits: Callable[[int], None] | None = None

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
        self.session.ask(Unpublish(), lambda _: done(), durable=True)

    def update(self, ended: Callable[[End], None], mode: Mode = "update") -> None:
        """Get the newest version."""
        assert self._round is None, f"{self.name} is in a round already"
        state = RoundState(self._next_round, None, mode, self.key, True, None, self.published)
        self._round, self._ended, self._done, self._verified = state, ended, 0.0, 0
        self._announcing, self._content = Announcing(self.assumptions.announce_s.value), b""
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
        for reader, lease in list(self.readers):
            reader.source_died(lease)

    # --- the round --------------------------------------------------------------------------------------------------

    def on_push(self, message: Reply) -> None:
        """Hear what the hub says unasked."""
        self._feed(Pushed(message))

    def on_reopened(self, welcome: Welcome) -> None:
        """Hear of a new welcome."""
        self._life += 1
        if self._round is not None:
            self._feed(Reopened(welcome))
            self._look()
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
                if isinstance(message, Done):
                    self.session.tell(self._sums(state))
                self.session.ask(message, lambda reply: self._answer(state, asked, reply))
            case Tell(message):
                if isinstance(message, Filling):
                    self._announcing.begin()
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
            self._feed(Answered(asked, reply))

    def _sums(self, state: RoundState) -> PutBlob:
        return self.shape.sums(state.key[1] if state.key is not None else -1)

    def _plan(self, state: RoundState, keep: bool) -> None:
        """Get what is not known of the sources, then the plan stands."""
        content = state.sources[0].sums
        if not keep or content != self._content:
            self._done, self._verified = 0.0, 0
        self._content = content
        self._announcing.begin()
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
        read.done, read.moved = self._done, self._look
        self._read = read
        dead: list[str] = []
        for source in state.sources:
            peer = self.peers[source.placement]
            lease = lease_of(state, source.lease)
            limit = self._limit(state.prefixes.get(source.lease, 0), source.lease in state.whole)
            read.add(lease, self.path(peer, self), limit)
            peer.readers.append((self, lease))
            self._from.append(peer)
            self.sources.append((self.events.now, source.replica, peer.session.identity.place.zone))
            if not peer.alive:
                dead.append(lease)
        read.begin()
        for lease in dead:
            self.source_died(lease)

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
        self._verify(read)
        self._done = min(read.done, self._limit(self._verified, False))
        self._leave_sources()
        self._later(0.0, state, lambda: ReadEnded(outcome))

    def _leave_sources(self) -> None:
        self._read = None
        for peer in self._from:
            peer.readers = [(reader, lease) for reader, lease in peer.readers if reader is not self]
        self._from = []

    def _bytes(self) -> int:
        return int(self._read.count()) if self._read is not None else int(self._done)

    def _all_here(self, state: RoundState) -> None:
        """Take the end of the read: everything is verified soon after."""
        read = self._read
        assert read is not None
        self._done, self._verified = read.done, self.shape.segments
        self._leave_sources()
        self._later(0.0, state, lambda: ReadEnded(ReadOutcome(ReadEnd.VERIFIED, _NO_READS, self.shape.total_bytes)))

    def _conclude(self, state: RoundState, end: End) -> None:
        self._next_round, self._round = state.number + 1, None
        self.session.ended = Ended(state.number, None if end.error is not None else end.key)
        self._leave_sources()
        if end.error is None and end.key is not None:
            self._hold(end.key, end.published or end.held)
        elif end.dirty:
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

    def _look(self, after_s: float = 0.0) -> None:
        """See to it that progress is announced, as `client/driver.py` does: it looks every few milliseconds."""
        if not self._looks and self._read is not None:
            self._looks = True
            seen = self._verified if self.readers else None
            pause_s = pause_between(self.assumptions, self._read, self.shape, seen)
            self.events.later(max(after_s, pause_s), self._announce)

    def _verify(self, read: Read) -> int:
        """Return how many segments are verified: those of what is in flight are not."""
        done, rate = read.count(), read.rate
        flight = self.assumptions.flight_bytes(rate) if rate > 0 else 0.0
        self._verified = max(self._verified, int(max(0.0, done - flight) // self.shape.segment_bytes))
        return self._verified

    def _announce(self) -> None:
        self._looks = False
        read, state = self._read, self._round
        if read is None or state is None or not self.alive:
            return
        a, now = self.assumptions, self.events.now
        figures = (self._verify(read), int(read.done))
        if a.direct_s.value:
            for reader, lease in self.readers:
                self.events.later(a.latency_s.value, reader.look_at, self, lease)
        if state.entered and self._announcing.is_due(figures, self._life, now, seen=bool(a.direct_s.value)):
            answered = self._announcing.note(figures, self._life, now)
            self.announced += 1
            self.session.ask(Announce(state.number, *figures), answered)
            if not a.announces_one.value:
                answered(Ok())
            self._look(a.announce_s.value if not a.direct_s.value else 0.0)
        elif read.rate or figures[0] > self._announcing.told[0]:
            self._look()  # else it looks again when something moves

    def look_at(self, source: Worker, lease: str) -> None:
        """See how far a source is, without the hub."""
        if source._read is not None:
            self._advance(lease, source._verified, False)
