"""The world of a walk: the real machine, the processes around it, and what is left of the budgets.

Time stands still: what time brings about is an action that makes the one thing due and ticks. A request reaches the
server when it is made and is answered then, because whoever is under way is like one that has not set out yet. What the
server says unasked, and that a round has committed, is heard at any later time, or never.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import product

from tensorhub_core.ids import Digest, ModelName, SessionId
from tensorhub_core.state import machine
from tensorhub_core.state.events import Effect, Event, Received, Send, Tick
from tensorhub_core.state.messages import (
    PROTOCOL,
    Committed,
    DropOffload,
    Ended,
    Held,
    Hello,
    LeaseLost,
    Offload,
    Register,
    RegisterStaging,
    Request,
    RoundAborted,
    SourceProgress,
    Superseded,
    UnknownSession,
    Welcome,
)
from tensorhub_core.state.records import BlobEntry, MachineConfig, ModelState, ServerState, Worker
from tests.sim.hub import LARGE_COPIES
from tests.walk import checks, hearing, zones
from tests.walk.actors import SEGMENTS, Actor, Violation
from tests.walk.clone import clone
from tests.walk.scenes import Scene

_MODEL = ModelName("policy")
NOW = 1000.0
DURABLE = ("unpublish", "unstage")
"""What is asked again after another hello."""
FIRST_ID = 1_000_000
"""Ids of one length compare as they were drawn."""


def code_of(epoch: int, number: int) -> int:
    """Return how cells and processes write a version."""
    return 100 * epoch + number


def key_of(code: int) -> tuple[int, int]:
    """Return the version that a code stands for."""
    return divmod(code, 100)


@dataclass(slots=True)
class World:
    """One state. `scene` holds the budgets that are left."""

    scene: Scene
    server: ServerState
    actors: list[Actor]
    born: int = 0
    brought: int = 0
    """The newest version that was whole at some replica of the readers' zone, in a scene with agents."""
    failed: bool = False
    """A process has died, or was given up while it lived."""
    doubts: int = 0
    """How often somebody who lives may have been taken for gone: follows from the budgets that are left."""
    over: frozenset[tuple[str, int]] = frozenset()
    promised: frozenset[tuple[str, int]] = frozenset()
    """Rounds that had ended, or had a promise, before the last step."""

    def clone(self) -> World:
        """Return an independent copy."""
        actors = [a.clone() for a in self.actors]
        left = (self.brought, self.failed, self.doubts)
        return World(self.scene, clone(self.server), actors, self.born, *left)

    def spend(self, budget: str) -> None:
        """Take one from a budget."""
        self.doubts += budget in ("doubts", "suspicions", "restarts")
        self.scene = replace(self.scene, **{budget: getattr(self.scene, budget) - 1})

    @property
    def model(self) -> ModelState:
        """Return what the server knows of the model; an empty one before anybody said hello."""
        return self.server.models.get(_MODEL) or ModelState(_MODEL)

    @property
    def listened(self) -> bool:
        """Tell whether the time is over in which the server of a later life only listens."""
        return self.server.listen_from_s + self.server.config.grace_s <= NOW

    # --- who is there -----------------------------------------------------------------------------------------------

    def worker(self, actor: Actor) -> Worker | None:
        """Return what the server knows of a process, if anything."""
        worker = self.server.sessions.get(actor.session)
        return None if worker is None else self.server.workers[worker]

    def known(self, actor: Actor) -> Worker | None:
        """Return what the server knows of a process, whether it reaches it or not."""
        return next((w for w in self.server.workers.values() if w.token == f"t{actor.life}"), None)

    def by_session(self, session: SessionId) -> Actor | None:
        """Return the process of a session."""
        return next((a for a in self.actors if a.session == session), None)

    def by_life(self, life: int) -> Actor | None:
        """Return the process of a life, if it lives."""
        return next((a for a in self.actors if a.life == life and a.alive), None)

    def group(self, actor: Actor) -> list[Actor]:
        """Return the processes of a replica."""
        return [a for a in self.actors if a.replica == actor.replica]

    # --- talk -------------------------------------------------------------------------------------------------------

    def ask(self, actor: Actor, kind: str, message: Request) -> None:
        """Send a request and hear what comes of it."""
        number = next(
            (n for n, what in actor.open.items() if what == kind and kind in actor.resend), actor.next_request
        )
        actor.next_request = max(actor.next_request, number + 1)
        actor.resend.discard(kind)
        actor.open[number] = kind
        self.feed(Received(actor.session, number, message))

    def feed(self, event: Event) -> None:
        """Let the machine take a step, deliver what it says, and check what can be seen from outside."""
        was_listening = checks.listens(self)
        self.over, self.promised = checks.rounds_with(self, "verdict"), checks.rounds_with(self, "key")
        try:
            _, effects = machine.step(self.server, event, NOW)
        except (AssertionError, KeyError, AttributeError, IndexError, RuntimeError) as error:
            raise Violation(f"the machine fails: {type(error).__name__}: {error}") from error
        zones.note_brought(self)
        checks.after_step(self, effects, was_listening)
        self.deliver(effects)

    def tick(self) -> None:
        """Let the machine look at the time."""
        self.feed(Tick())

    def deliver(self, effects: Iterable[Effect]) -> None:
        """Bring everybody what the server says."""
        for effect in effects:
            actor = self.by_session(effect.session) if isinstance(effect, Send) else None
            if actor is None or not actor.alive or not isinstance(effect, Send):
                continue
            message = effect.message
            if effect.request:
                kind = actor.open.pop(effect.request, "")
                if not kind and effect.request > actor.forgotten:
                    raise Violation(f"{actor.name} is answered {type(message).__name__} to what it did not ask")
                if kind:
                    actor.resend.discard(kind)
                    hearing.hear(self, actor, kind, message)
            elif isinstance(message, LeaseLost) and message.round == actor.round:
                actor.lost.add(message.lease)
            elif isinstance(message, RoundAborted) and message.round == actor.round and actor.in_round:
                if actor.committed:
                    raise Violation(f"L13: {actor.name} is told that its round has committed, and that it was aborted")
                actor.aborted = True
            elif isinstance(message, SourceProgress) and message.lease in actor.sources:
                life, which, prefix, epoch = actor.sources[message.lease]
                prefix = max(prefix, SEGMENTS if message.whole else message.prefix)
                actor.sources[message.lease] = (life, which, prefix, epoch)
            elif isinstance(message, Offload):
                actor.offload_asked = message.copy
            elif isinstance(message, DropOffload):
                hearing.drop_offload(self, actor, message)
            elif isinstance(message, UnknownSession):
                actor.greet = True
            elif isinstance(message, Superseded):
                actor.alive, actor.phase = False, "over"

    def hello(self, actor: Actor) -> None:
        """Say hello, for the first time or again, and what memory there is; a round begins anew."""
        held = held_by(self.scene, actor, actor.held, b"P%d" % actor.life) if actor.held else None
        offloads = tuple(
            held_by(self.scene, actor, code, b"O%d.%d" % (actor.life, code)) for code in sorted(actor.offloads)
        )
        actor.greet = False
        actor.open = {number: kind for number, kind in actor.open.items() if kind in DURABLE}
        actor.resend, actor.forgotten, actor.offload_asked = set(actor.open.values()), actor.next_request - 1, ""
        self.server.blobs.update(blobs_of(self.scene, self.born))
        self.server.blob_bytes = sum(len(entry.data) for entry in self.server.blobs.values())
        high = key_of(actor.high) if actor.high else None
        shards = self.scene.shards
        token = f"t{actor.life}"
        ended = (
            None if actor.ended is None else Ended(actor.ended[0], key_of(actor.ended[1]) if actor.ended[1] else None)
        )
        place = ("policy", actor.replica, actor.shard, shards)
        announces = self.scene.reshards and not actor.is_source
        about = {"high": high, "held": held, "offloads": offloads, "ended": ended, "announces_sums": announces}
        about["zone"] = ("east" if actor.is_source else "west") if self.scene.zones else ""
        if self.scene.agents and not actor.is_source:
            about |= {"zone": zones.ZONE, "seeds": actor.seeds}
        hello = Hello(PROTOCOL, token, *place, **about)  # type: ignore[arg-type]
        self.ask(actor, "hello", hello)
        if not actor.alive:
            return
        self.ask(actor, "register", Register(layout_of(self.scene, actor), b"P%d" % actor.life, 200, SEGMENTS))
        if self.scene.stages and not actor.is_source:
            self.ask(actor, "register", RegisterStaging(b"S%d" % actor.life))
        hearing.reopened(actor)

    def birth(self, place: int, replica: str, shard: int, is_source: bool) -> Actor:
        """Start a process in a place."""
        self.born += 1
        actor = Actor(place, replica, shard, is_source, self.born, SessionId(b"s%d" % self.born))
        actor.seeds = replica in [f"reader-{letter}" for letter in "abc"[: self.scene.agents]]
        if place < len(self.actors):
            self.actors[place] = actor
        else:
            self.actors.append(actor)
        self.hello(actor)
        return actor


def held_by(scene: Scene, actor: Actor, code: int, placement: bytes) -> Held:
    """Return what a process says that it holds."""
    return Held(*key_of(code), layout_of(scene, actor), placement, sums_of(scene, actor, code), 200, SEGMENTS)


def layout_of(scene: Scene, actor: Actor) -> bytes:
    """Return the digest of a process's layout."""
    return (b"R%d" if scene.reshards and not actor.is_source else b"L%d") % actor.shard


def sums_of(scene: Scene, actor: Actor, code: int) -> bytes:
    """Return the digest of a version's checksums in a process's layout."""
    return (b"r%d/%d" if scene.reshards and not actor.is_source else b"v%d/%d") % (code, actor.shard)


def packed_sums(code: int, shard: int) -> bytes:
    """Return the checksums of a version in the layout of those who reshard."""
    return b"".join((1000 * code + 10 * shard + segment).to_bytes(8, "little") for segment in range(SEGMENTS))


def blobs_of(scene: Scene, born: int) -> dict[Digest, BlobEntry]:
    """Return all blobs that there can be: nobody has to upload any."""
    names = [b"L%d" % shard for shard in range(scene.shards)]
    names += [kind % life for life in range(1, born + 1) for kind in (b"P%d", b"S%d")]
    codes = [code_of(1, v + 1) for v in range(scene.versions)]
    names += [b"v%d/%d" % (code, shard) for code in codes for shard in range(scene.shards)]
    names += [b"R%d" % shard for shard in range(scene.shards)]
    names += [b"O%d.%d" % (life, code) for life in range(1, born + 1) for code in codes]
    found = {Digest(name): BlobEntry(b"", NOW) for name in names}
    for code, shard in product(codes, range(scene.shards) if scene.reshards else ()):
        found[Digest(b"r%d/%d" % (code, shard))] = BlobEntry(packed_sums(code, shard), NOW)
    return found


def new_server(scene: Scene, epoch: int) -> ServerState:
    """Return a server that has just started."""
    waits = 0 if scene.queues else 1 << 30
    config = MachineConfig(epoch, worth_waiting_bytes=waits, retain=scene.retain, policy=LARGE_COPIES)
    server = ServerState.new(config, NOW)
    server.counter = FIRST_ID
    return server


def new_world(scene: Scene) -> World:
    """Return the world in which everybody has said hello and nothing else has happened."""
    world = World(scene, new_server(scene, 1), [])
    world.server.listen_from_s = NOW - world.server.config.grace_s
    for is_source, count in ((True, scene.sources), (False, scene.readers)):
        for r in range(count):
            for shard in range(scene.shards):
                world.birth(len(world.actors), f"{'source' if is_source else 'reader'}-{'abc'[r]}", shard, is_source)
    return world


__all__ = [
    "NOW",
    "Committed",
    "Welcome",
    "World",
    "code_of",
    "key_of",
    "new_server",
    "new_world",
    "packed_sums",
    "sums_of",
]
