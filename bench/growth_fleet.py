"""A fleet around the real server machine, in one process and without a network: every step is counted and timed.

The clients are scripts: they send what real ones send in a round, in the same order, and believe every answer. Time
stands still unless `later` moves it, so nobody is late, and what is timed is the machine alone.
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import xxhash

from tensorhub_core.ids import SessionId
from tensorhub_core.state.events import Event, Received, Send, Tick
from tensorhub_core.state.machine import MachineConfig, ServerState, step
from tensorhub_core.state.messages import (
    PROTOCOL,
    Announce,
    Available,
    Committed,
    Done,
    Failure,
    Filling,
    GetBlob,
    Heartbeat,
    Hello,
    JoinRound,
    Offload,
    Offloaded,
    Promise,
    Publish,
    PutBlob,
    Register,
    Reply,
    Request,
    Unpublish,
    Wait,
)

SEGMENTS = 64
SEGMENT_BYTES = 16 << 20
"""A shard of 1 GiB: large enough to be waited for, so that readers queue behind each other."""
MARKS = 8
"""Prefixes that a reader announces on its way."""
LAYOUT = b"a layout"


@dataclass(slots=True)
class Cost:
    """Steps of one kind, and the CPU seconds that they took."""

    count: int = 0
    seconds: float = 0.0

    @property
    def each_us(self) -> float:
        """Return microseconds a step."""
        return 1e6 * self.seconds / max(1, self.count)


@dataclass(slots=True)
class Client:
    """One worker: what it was told last of each kind."""

    session: SessionId
    replica: str
    shard: int
    number: int = 0
    round: int = 0
    answer: Reply | None = None
    heard: dict[type[Reply], Reply] = field(default_factory=dict)
    withdrawing: int = 0
    """The number of its open `Unpublish`, 0 if there is none."""
    known: set[bytes] = field(default_factory=set)
    """Blobs that it was given."""


def digest(data: bytes) -> bytes:
    """Return the digest under which a blob is stored."""
    return xxhash.xxh3_128_digest(data)


class Fleet:
    """A trainer and so many replicas that follow it. `costs` is by the kind of message, and `Tick`."""

    def __init__(self, replicas: int, shards: int = 1, *, spot: bool = False, seed: int = 0) -> None:
        config = MachineConfig(1, max_workers=1 << 20, retain=1)
        self.now, self.costs = 1000.0, dict[str, Cost]()
        self.state = ServerState.new(config, self.now)
        self.pushes = 0
        self._clients: dict[SessionId, Client] = {}
        self._chance = random.Random(seed)
        self.version = -1
        self.trainer = [self.connect("trainer", k, shards) for k in range(shards)]
        self.replicas = [
            [self.connect(f"rollout-{n}", k, shards, spot=spot) for k in range(shards)] for n in range(replicas)
        ]

    @property
    def readers(self) -> list[Client]:
        """Return the workers of all replicas."""
        return [client for group in self.replicas for client in group]

    # --- one message ----------------------------------------------------------------------------------------------

    def feed(self, event: Event, kind: str) -> None:
        """Take a step, time it, and let the clients hear what came of it."""
        began = time.thread_time()
        self.state, effects = step(self.state, event, self.now)
        took = time.thread_time() - began
        cost = self.costs.setdefault(kind, Cost())
        cost.count, cost.seconds = cost.count + 1, cost.seconds + took
        for effect in effects:
            if isinstance(effect, Send):
                self._hear(self._clients[effect.session], effect.request, effect.message)

    def ask(self, client: Client, message: Request) -> Reply | None:
        """Send a request; return its answer, None if that is deferred. A refusal is an error of the script."""
        client.number += 1
        client.answer = None
        self.feed(Received(client.session, client.number, message), type(message).__name__)
        if isinstance(client.answer, Failure):
            raise RuntimeError(f"{type(message).__name__} was refused: {client.answer.message}")
        return client.answer

    def _hear(self, client: Client, request: int, message: Reply) -> None:
        client.heard[type(message)] = message
        if request == 0:
            self.pushes += 1
        elif request == client.number:
            client.answer = message
        if request and request == client.withdrawing:
            client.withdrawing = 0

    # --- what workers do ------------------------------------------------------------------------------------------

    def connect(self, replica: str, shard: int, shards: int, *, spot: bool = False) -> Client:
        """Say hello and register memory."""
        session = SessionId(f"{replica}/{shard}".encode())
        client = self._clients[session] = Client(session, replica, shard)
        zone, host = "", f"host of {replica}"
        token = f"token of {replica}/{shard}"
        self.ask(client, Hello(PROTOCOL, token, "policy", replica, shard, shards, None, zone, host, spot))
        layout, placement = LAYOUT + b" %d" % shard, b"placement of " + session
        for blob in (layout, placement):
            self.ask(client, PutBlob(digest(blob), blob))
        size = SEGMENTS * SEGMENT_BYTES
        self.ask(client, Register(digest(layout), digest(placement), size, SEGMENTS))
        return client

    def later(self, seconds: int) -> None:
        """Let time pass with a heartbeat of everybody, and a tick, each second."""
        for _ in range(seconds):
            self.now += 1.0
            for client in self._clients.values():
                self.ask(client, Heartbeat())
            self.tick()

    def tick(self) -> None:
        """Do what only time brings about."""
        self.feed(Tick(), "Tick")

    def sums(self, client: Client) -> bytes:
        """Return the checksums of a shard of the newest version."""
        return b"sums %d %d" % (self.version, client.shard)

    def wait(self) -> None:
        """Let every reader wait for a newer version."""
        for client in self.readers:
            client.heard.pop(Available, None)
            self.ask(client, Wait(None if self.version < 0 else (1, self.version)))

    def publish(self) -> None:
        """Let the trainer take its version back and publish the next one."""
        if self.version >= 0:
            self._withdraw(self.trainer)
        self.version += 1
        for client in self.trainer:
            self._put_sums(client)
            self.ask(client, Publish(self.version, digest(self.sums(client)), room_bytes=1 << 45))

    def join(self, groups: Sequence[Sequence[Client]]) -> None:
        """Let replicas join a round, in any order, and prepare to read."""
        for client in [client for group in groups for client in group]:
            client.heard.pop(Promise, None)
            client.heard.pop(Committed, None)
            client.round += 1
            self.ask(client, JoinRound(client.round - 1, None, "update"))

    def enter(self, groups: Sequence[Sequence[Client]]) -> None:
        """Let replicas that were promised a version fetch what they need, withdraw the old one and begin to fill."""
        everybody = [client for group in groups for client in group]
        for client in everybody:
            promise = client.heard.get(Promise)
            if not isinstance(promise, Promise):
                raise RuntimeError(f"{client.replica}/{client.shard} was promised nothing")
            client.known.update(map(digest, promise.blobs))
            for name in {name for source in promise.sources for name in (source.placement, source.sums)} - client.known:
                self.ask(client, GetBlob(name))
                client.known.add(name)
        self._withdraw(everybody)
        for client in everybody:
            self.ask(client, Filling(client.round - 1))

    def announce(self, groups: Sequence[Sequence[Client]], mark: int) -> None:
        """Let readers announce a part of what they read."""
        prefix = SEGMENTS * mark // (MARKS + 1)
        for client in [client for group in groups for client in group]:
            self.ask(client, Announce(client.round - 1, prefix, prefix * SEGMENT_BYTES))

    def finish(self, groups: Sequence[Sequence[Client]]) -> None:
        """Let readers be done, and hear that it is committed."""
        everybody = [client for group in groups for client in group]
        for client in everybody:
            sums = digest(self.sums(client))
            if sums not in client.known:
                self._put_sums(client)
            self.ask(client, Done(client.round - 1, sums))
        if not all(Committed in client.heard for client in everybody):
            raise RuntimeError("a round was not committed")

    def update(self, *, ticks: bool = False) -> None:
        """Publish a version to everybody: all wait for it, read it, and hold it at the end."""
        self.wait()
        self.publish()
        if not all(Available in client.heard for client in self.readers):
            raise RuntimeError("somebody was not told of the version")
        groups = list(self.replicas)
        self._chance.shuffle(groups)
        self.join(groups)
        self.enter(groups)
        for mark in range(1, MARKS + 1):
            self.announce(groups, mark)
            if ticks and mark % 4 == 0:
                self.tick()
        self.finish(groups)

    def _put_sums(self, client: Client) -> None:
        sums = self.sums(client)
        self.ask(client, PutBlob(digest(sums), sums))

    def _withdraw(self, clients: Sequence[Client]) -> None:
        """Take copies back; who has to keep one in host memory does so."""
        for client in clients:
            client.withdrawing = client.number + 1
            self.ask(client, Unpublish())
        for client in clients:
            asked = client.heard.pop(Offload, None)
            if client.withdrawing and isinstance(asked, Offload):
                blob = b"offload %d of " % asked.number + client.session
                self.ask(client, PutBlob(digest(blob), blob))
                self.ask(client, Offloaded(asked.copy, digest(blob)))
        if any(client.withdrawing for client in clients):
            raise RuntimeError("a copy was not withdrawn")
