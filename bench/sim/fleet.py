"""A fleet: a hub, workers in zones and hosts, and links between them."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from bench.sim.assumptions import Assumptions
from bench.sim.events import Events
from bench.sim.hub import Hub
from bench.sim.links import Link, Network
from bench.sim.session import Identity, Place, Session
from bench.sim.shapes import Shape, blob
from bench.sim.workers import Peers, Worker

from tensorhub_core.client.rounds import End
from tensorhub_core.ids import SessionId
from tensorhub_core.state.messages import Reply

MODEL = "policy"
HOME = "home"
_BEATS = 20
_LIMIT_S = 3600.0
_MOST_TRIES = 20
_HASTE = 1000.0
"""So many times as fast are links while versions pass that are not measured."""


class SimulationError(Exception):
    """A simulated fleet did not do what it was to do; the text says what."""


@dataclass(eq=False)
class Replica:
    """The workers of one replica."""

    name: str
    workers: list[Worker]
    ready_s: float = 0.0
    began_s: float | None = None
    ended_s: float | None = None
    errors: list[str] = field(default_factory=list)

    @property
    def stall_s(self) -> float:
        """Return how long its GPUs have stood still for its last update."""
        if self.began_s is None or self.ended_s is None:
            raise SimulationError(f"{self.name} has not got the version: {self.errors}")
        return self.ended_s - self.began_s


class Fleet:
    """One simulated world. Everything in it comes from the seed."""

    def __init__(self, assumptions: Assumptions, shard_bytes: int, shards: int, seed: int = 1, **config: Any) -> None:
        self.assumptions, self.shards = assumptions, shards
        self.events, self.network = Events(), Network()
        self.events.after = self.network.settle
        self.random = random.Random(seed)
        self.hub = Hub(self.events, assumptions, self._deliver, **config)
        self.peers: Peers = {}
        self.replicas: dict[str, Replica] = {}
        self.wan: dict[tuple[str, str], Link] = {}
        self._links: list[Link] = []
        self._haste = 1.0
        self._sessions: dict[SessionId, Session] = {}
        self._hosts: dict[str, int] = {}
        self._beat = 0
        self._open: set[str] = set()
        """Replicas that have yet to get a version."""
        segment = assumptions.segment_bytes.value
        self.shapes = [
            Shape(blob(f"layout {shard}".encode().ljust(4096)), shard_bytes, segment) for shard in range(shards)
        ]
        self.events.later(assumptions.heartbeat_s.value / _BEATS, self._beats)

    # --- who is there -----------------------------------------------------------------------------------------------

    def add(self, name: str, zone: str = HOME, *, spot: bool = False, seeds: bool = False) -> Replica:
        """Add a replica; its workers fill hosts one after the other."""
        workers = [self._worker(name, shard, zone, spot, seeds) for shard in range(self.shards)]
        replica = self.replicas[name] = Replica(name, workers)
        return replica

    def _worker(self, name: str, shard: int, zone: str, spot: bool, seeds: bool) -> Worker:
        a, number = self.assumptions, len(self._sessions)
        kind = zone + (" agents" if seeds else "")
        slot = self._hosts[kind] = self._hosts.get(kind, -1) + 1
        per = a.gpus_per_host.value
        place = Place(zone, f"{kind} host {slot // per}", f"rail {slot % per}")
        identity = Identity(MODEL, name, shard, self.shards, place, spot, seeds)
        latency_s = a.latency_s.value + (a.wan_latency_s.value if zone != HOME else 0.0)
        id_ = SessionId(b"session %d" % number)
        listener = _Late()
        session = Session(self.hub, identity, listener, latency_s, id_)
        nic = a.link_bytes_per_s
        out, into = self._link(f"{name}/{shard} out", nic), self._link(f"{name}/{shard} in", nic)
        shape = self.shapes[shard]
        gives = self._link(f"{name}/{shard} to neighbours", a.bus_bytes_per_s.value)
        bus = (gives, self._link(f"{name}/{shard} from them", nic))
        worker = Worker(self.events, self.network, a, session, shape, self.peers, self.path, out, into, bus)
        session.listener = worker
        self._sessions[id_] = session
        return worker

    def path(self, source: Worker, reader: Worker) -> tuple[Link, ...]:
        """Return the links between two workers."""
        here, there = source.session.identity.place, reader.session.identity.place
        if here.host == there.host:
            return (source.bus[0], reader.bus[1])
        if here.zone == there.zone:
            return (source.out, reader.into)
        return (source.out, self._between(here.zone, there.zone), reader.into)

    def _between(self, one: str, other: str) -> Link:
        if (one, other) not in self.wan:
            self.wan[one, other] = self._link(f"{one} to {other}", self.assumptions.between_bytes_per_s)
        return self.wan[one, other]

    def _link(self, name: str, bytes_per_s: float) -> Link:
        link = Link(name, bytes_per_s * self._haste)
        self._links.append(link)
        return link

    def workers(self) -> Iterable[Worker]:
        """Yield all workers."""
        for replica in self.replicas.values():
            yield from replica.workers

    # --- what happens -----------------------------------------------------------------------------------------------

    def run(self, done: Callable[[], bool], what: str, limit_s: float = _LIMIT_S) -> None:
        """Let time pass until something is done; raises SimulationError if it is not within a limit."""
        if not self.events.run(done, self.events.now + limit_s):
            raise SimulationError(f"{what}: not done after {limit_s:g} simulated seconds")

    def connect(self, replicas: Iterable[Replica]) -> None:
        """Let replicas connect and register."""
        left: set[str] = set()
        for replica in replicas:
            for worker in replica.workers:
                left.add(worker.name)
                worker.connect(lambda name=worker.name: left.discard(name))  # type: ignore[misc]
        self.run(lambda: not left, "connecting")

    def unpublish(self, replica: Replica) -> None:
        """Let a replica take its copy back."""
        left = {worker.name for worker in replica.workers}
        for worker in replica.workers:
            worker.unpublish(lambda name=worker.name: left.discard(name))  # type: ignore[misc]
        self.run(lambda: not left, "unpublishing")

    def publish(self, replica: Replica, version: int) -> None:
        """Let a replica publish a version."""
        left = {worker.name for worker in replica.workers}
        for worker in replica.workers:
            worker.publish(version, lambda name=worker.name: left.discard(name))  # type: ignore[misc]
        self.run(lambda: not left, "publishing")

    def pass_versions(self, trainer: Replica, others: Iterable[Replica], agent: Replica | None = None) -> int:
        """Let all get some versions, quickly, as if they had been at it for long; return the newest, which all hold.

        With a seed agent the others get each version when they are told that their zone has it. What is counted,
        links carried and sources gave, is counted from here on.
        """
        others, newest = list(others), self.assumptions.earlier.value
        self._hurry(_HASTE)
        for version in range(1, newest + 1):
            if version > 1:
                self.unpublish(trainer)
            self.publish(trainer, version)
            if agent is not None:
                self.update_when_told(others)
                self.update_all([agent], [self.events.now])
            else:
                self.update_all(others, [self.events.now] * len(others))
        self._hurry(1 / _HASTE)
        for link in self._links:
            link.carried_bytes = 0.0
        for worker in self.workers():
            worker.sources, worker.progress.announced = [], 0
        self.hub.most_waiting_s = 0.0
        return newest

    def renew(self, trainer: Replica, version: int) -> float:
        """Let the trainer take its copy back and publish the next version; return how long it is stalled for that."""
        began_s = self.events.now
        self.unpublish(trainer)
        self.publish(trainer, version)
        return self.events.now - began_s

    def _hurry(self, times: float) -> None:
        self._haste *= times
        for link in self._links:
            link.bytes_per_s *= times
            self.network.touch(link)

    def update_at(self, replica: Replica, time_s: float) -> None:
        """Let a replica stop at a time and get the newest version."""
        replica.ready_s, replica.began_s, replica.ended_s = time_s, None, None
        self._open.add(replica.name)
        self.events.at(time_s, self.update, replica)

    def update(self, replica: Replica, again: bool = False) -> None:
        """Let a replica stop now and get the newest version; a round that is broken is tried again."""
        if not all(worker.alive for worker in replica.workers):
            return
        if not again:
            replica.began_s = self.events.now
        left = {worker.name for worker in replica.workers}
        failed: list[str] = []

        def ended(name: str, end: End) -> None:
            left.discard(name)
            if end.error is not None:
                failed.append(str(end.error))
            if left:
                return
            if failed:
                replica.errors += failed[:1]
                if len(replica.errors) < _MOST_TRIES:
                    self.events.later(0.1, self.update, replica, True)
                    return
            else:
                replica.ended_s = self.events.now
            self._open.discard(replica.name)

        for worker in replica.workers:
            worker.update(lambda end, name=worker.name: ended(name, end))  # type: ignore[misc]

    def update_all(self, replicas: Iterable[Replica], times_s: Iterable[float]) -> None:
        """Let replicas update, each at its time, and wait for all."""
        replicas = list(replicas)
        for replica, time_s in zip(replicas, times_s, strict=True):
            self.update_at(replica, time_s)
        self.settle()

    def settle(self) -> None:
        """Wait until all who are to get a version have it, are dead or have given up."""
        self.run(lambda: not self._open, "updating")

    def update_when_told(self, replicas: Iterable[Replica]) -> None:
        """Let replicas ask for a newer version, and stop and get it when the hub tells them of one."""
        for replica in replicas:
            replica.began_s = replica.ended_s = None
            self._open.add(replica.name)
            replica.workers[0].wait(lambda _, replica=replica: self.update(replica))  # type: ignore[misc]

    def kill(self, replica: Replica) -> None:
        """Kill all processes of a replica."""
        self._open.discard(replica.name)
        for worker in replica.workers:
            worker.kill()

    def kill_hub(self) -> None:
        """Kill the hub; another life of it begins a while later, and everybody finds it within a part of a lease."""
        a = self.assumptions
        self.hub.kill()
        for session in self._sessions.values():
            session.lost()
        self.events.later(a.restart_s.value, self._restart)

    def _restart(self) -> None:
        self.hub.start()
        within_s = self.assumptions.hello_within.value * self.assumptions.lease_s.value
        for session in self._sessions.values():
            self.events.later(self.random.uniform(0.0, within_s), session.again)

    def _deliver(self, session: SessionId, request: int, message: Reply) -> None:
        to = self._sessions[session]
        self.events.later(to.latency_s, to.hear, request, message)

    def _beats(self) -> None:
        """Let every twentieth worker say that it lives."""
        self._beat = (self._beat + 1) % _BEATS
        for number, session in enumerate(self._sessions.values()):
            if number % _BEATS == self._beat:
                session.beat()
        self.events.later(self.assumptions.heartbeat_s.value / _BEATS, self._beats)


class _Late:
    """Stands for a worker that is being made."""

    def on_push(self, message: Reply) -> None:
        """Hear nothing."""

    def on_reopened(self, welcome: object) -> None:
        """Hear nothing."""
