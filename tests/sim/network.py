"""The control plane's network: connections that keep order and lose nothing but themselves, and a server behind them.

What can happen to ZeroMQ over TCP happens here: delay, one way that is clogged, a partition that holds messages back, a
connection that is lost with what is on its way (or whose last messages arrive after the next connection's hello), a
server that is stopped, killed and started again under the next epoch.
"""

from __future__ import annotations

import dataclasses
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from greenlet import GreenletExit

from tensorhub_core.client.link import LinkEvent
from tensorhub_core.ids import SessionId
from tensorhub_core.state.events import Disconnected, Effect, Event, Received, Send, Tick
from tensorhub_core.state.machine import MachineConfig, ServerState, step
from tensorhub_core.wire.codec import decode_request, encode, split
from tests.sim.fibers import Process, Spinning, Timeline
from tests.sim.shims import Waiters

_RETRY_S = 0.2
_MOST_IN_VAIN = 1000
"""Turns of a session in a row in which it neither waits nor has anything to do."""
Hear = Callable[[Event, list[Effect]], None]


@dataclass
class Weather:
    """How the network is now, by process name; `hub` is the server."""

    base_s: float = 5e-4
    spread_s: float = 2e-3
    blocked_until: dict[str, float] = field(default_factory=dict)
    clogged: dict[tuple[str, bool], tuple[float, float]] = field(default_factory=dict)
    """(process, towards the hub) -> (until, delay)."""

    def delay_s(self, chance: random.Random, name: str, to_hub: bool, now: float) -> float:
        """Return how long a message takes."""
        until, more_s = self.clogged.get((name, to_hub), (0.0, 0.0))
        slow_s = more_s * (0.5 + chance.random()) if now < until else 0.0
        return self.base_s + self.spread_s * chance.random() ** 3 + slow_s

    def blocked(self, name: str, now: float) -> float:
        """Return until when nothing passes between a process and the rest, 0 if something does."""
        until = max(self.blocked_until.get(name, 0.0), self.blocked_until.get("hub", 0.0))
        return until if until > now else 0.0


class Pipe:
    """One direction of a connection: messages arrive in order, each after its own delay, or never."""

    def __init__(self, net: Network, name: str, to_hub: bool, deliver: Callable[[list[bytes]], None]) -> None:
        self._net, self._name, self._to_hub, self._deliver = net, name, to_hub, deliver
        self._waiting: deque[tuple[float, list[bytes]]] = deque()
        self._pumping = False
        self._last_s = 0.0

    def send(self, frames: list[bytes]) -> None:
        """Put a message on its way."""
        net = self._net
        delay_s = net.weather.delay_s(net.chance, self._name, self._to_hub, net.timeline.now)
        self._last_s = max(self._last_s, net.timeline.now + delay_s)
        self._waiting.append((self._last_s, frames))
        if not self._pumping:
            self._pumping = True
            net.timeline.at(self._last_s, self._pump)

    def cut(self, keep: int) -> None:
        """Lose what is on its way, but for the first `keep` messages."""
        while len(self._waiting) > keep:
            self._waiting.pop()

    def __len__(self) -> int:
        return len(self._waiting)

    def _pump(self) -> None:
        self._pumping = False
        net = self._net
        while self._waiting and self._waiting[0][0] <= net.timeline.now:
            until = net.weather.blocked(self._name, net.timeline.now)
            if until:
                return self._again(until + net.weather.base_s)
            self._deliver(self._waiting.popleft()[1])
        if self._waiting:
            self._again(self._waiting[0][0])

    def _again(self, when: float) -> None:
        self._pumping = True
        self._net.timeline.at(when, self._pump)


class Connection:
    """A DEALER's connection to the ROUTER, under an identity that is never used again."""

    def __init__(self, net: Network, link: SimLink, session: SessionId) -> None:
        self.net, self.link, self.session = net, link, session
        self.open = True
        self.to_hub = Pipe(net, link.process.name, True, self._at_hub)
        self.to_client = Pipe(net, link.process.name, False, self._at_client)
        self.life = net.hub.life

    def _at_hub(self, frames: list[bytes]) -> None:
        if self.life == self.net.hub.life:
            self.net.hub.receive(self, frames)

    def _at_client(self, frames: list[bytes]) -> None:
        self.link.arrived(self, frames)

    def lose(self) -> None:
        """Lose the connection and what is on its way; the last messages to the hub may still be read there."""
        if not self.open:
            return
        self.open = False
        chance = self.net.chance
        self.to_hub.cut(chance.randint(0, len(self.to_hub)))
        self.to_client.cut(chance.randint(0, len(self.to_client)))
        self.net.timeline.after(chance.random() * 0.05, lambda: self.link.lost(self))


class SimLink:
    """`client.link.Link` over the simulated network."""

    def __init__(self, net: Network, process: Process, address: str) -> None:
        self.net, self.process, self.address = net, process, address
        self.trouble = "no connection"
        self.connected = False
        self.connection: Connection | None = None
        self._inbox: deque[list[bytes]] = deque()
        self._events: deque[LinkEvent] = deque()
        self._waiters = Waiters(net.timeline)
        self._woken = self._closed = False
        self._tries = self._in_vain = 0
        self._connect()

    def _connect(self) -> None:
        self._tries += 1
        tried = self._tries
        net = self.net

        def attempt() -> None:
            if self._closed or not self.process.alive or tried != self._tries:
                return
            if net.weather.blocked(self.process.name, net.timeline.now) or not net.hub.up:
                self.trouble = "the connection was refused"
                net.timeline.after(_RETRY_S * (0.5 + net.chance.random()), attempt)
                return
            self.connection = net.connect(self)
            self.connected = True
            self._note(LinkEvent.UP)

        net.timeline.after(net.weather.delay_s(net.chance, self.process.name, True, net.timeline.now), attempt)

    def _note(self, event: LinkEvent) -> None:
        self._events.append(event)
        self._waiters.wake()

    def arrived(self, connection: Connection, frames: list[bytes]) -> None:
        """Take a message in."""
        if connection is self.connection and self.process.alive:
            self._inbox.append(frames)
            self._waiters.wake()

    def lost(self, connection: Connection) -> None:
        """Learn that the connection is gone."""
        if connection is self.connection and self.process.alive:
            self.connected, self.trouble = False, "the connection was closed"
            self._note(LinkEvent.DOWN)

    def renew(self, address: str | None = None) -> None:
        """Drop the connection and begin to connect again."""
        self._close()
        self._connect()

    def wake(self) -> None:
        """Make `wait` return."""
        self._woken = True
        self._waiters.wake()

    def wait(self, timeout_s: float, writable: bool = False) -> None:
        """Wait until something arrives or somebody wakes the link."""
        if not self.process.alive:
            raise GreenletExit
        ready = self._woken or self._inbox or self._events or (writable and self.connected)
        self._in_vain = 0 if ready or timeout_s > 0 else self._in_vain + 1
        if self._in_vain > _MOST_IN_VAIN:
            raise Spinning(f"the session of {self.process.name} does not wait for anything")
        if timeout_s > 0 and not ready:
            self._waiters.wait(max(timeout_s, 1e-3))
        self._woken = False

    def events(self) -> list[LinkEvent]:
        """Return what happened to the connection."""
        found = list(self._events)
        self._events.clear()
        return found

    def send(self, frames: list[bytes]) -> bool:
        """Send a message if there is a connection."""
        if self.connection is None or not self.connected or not self.process.alive:
            return False
        if self.connection.open:
            self.net.sent(self.process.name, frames, True)
            self.connection.to_hub.send(frames)
        return True

    def receive(self) -> list[bytes] | None:
        """Return the next message, or None."""
        return self._inbox.popleft() if self._inbox else None

    def close(self) -> None:
        """Close everything at once."""
        self._closed = True
        self._close()

    def _close(self) -> None:
        connection, self.connection, self.connected = self.connection, None, False
        self._inbox.clear()
        self._events.clear()
        if connection is not None:
            connection.lose()


class Hub:
    """The real server machine where `server.loop` has it: steps, ticks, and sessions that cannot be reached."""

    def __init__(self, net: Network, config: MachineConfig, hear: Hear) -> None:
        self.net, self.config, self._hear = net, config, hear
        self.epoch = self.life = 0
        self.up = False
        self.paused_until = 0.0
        self.state: ServerState = ServerState.new(config, net.timeline.now)
        self.peers: dict[SessionId, Connection] = {}
        self._tick_at: float | None = None

    def start(self) -> None:
        """Begin a life that knows nothing, unless one is under way."""
        if self.up:
            return
        self.epoch += 1
        self.life += 1
        self.up, self._tick_at = True, None
        config = dataclasses.replace(self.config, server_epoch=self.epoch)
        self.state = ServerState.new(config, self.net.timeline.now)

    def kill(self) -> None:
        """Die: all connections are lost. Idempotent."""
        self.up = False
        self.life += 1
        for connection in list(self.peers.values()):
            connection.lose()
        self.peers.clear()

    def receive(self, connection: Connection, frames: list[bytes]) -> None:
        """Read a message, now or when the process goes on."""
        now = self.net.timeline.now
        if self.paused_until > now:
            life = self.life
            again = lambda: self.receive(connection, frames) if self.life == life else None  # noqa: E731
            return self.net.timeline.at(self.paused_until, again)
        header = split(frames)
        self.step(Received(connection.session, header.request, decode_request(header)))

    def step(self, event: Event) -> None:
        """Take a step and carry out its effects."""
        events: deque[Event] = deque([event])
        lost: set[SessionId] = set()
        while events:
            current = events.popleft()
            self.state, effects = step(self.state, current, self.net.timeline.now)
            self._hear(current, effects)
            for effect in effects:
                if isinstance(effect, Send) and not self._send(effect) and effect.session not in lost:
                    lost.add(effect.session)
                    events.append(Disconnected(effect.session))
        due = self.state.next_deadline(self.net.timeline.now)
        if due is not None and (self._tick_at is None or due < self._tick_at):
            self._tick_at = due
            life = self.life
            self.net.timeline.at(due, lambda: self._tick(life))

    def _tick(self, life: int) -> None:
        now = self.net.timeline.now
        if life != self.life or not self.up:
            return
        if self.paused_until > now:
            return self.net.timeline.at(self.paused_until, lambda: self._tick(life))
        if self._tick_at is not None and now >= self._tick_at:
            self._tick_at = None
            self.step(Tick())

    def _send(self, effect: Send) -> bool:
        connection = self.peers.get(effect.session)
        if connection is None or not connection.open:
            self.peers.pop(effect.session, None)
            return False
        frames = encode(effect.request, effect.message)
        self.net.sent(connection.link.process.name, frames, False)
        connection.to_client.send(frames)
        return True


class Network:
    """All connections of one world."""

    def __init__(self, timeline: Timeline, chance: random.Random, config: MachineConfig, hear: Hear) -> None:
        self.timeline, self.chance = timeline, chance
        self.weather = Weather()
        self.hub = Hub(self, config, hear)
        self.trace: Callable[[str, list[bytes], bool], None] | None = None
        self._count = 0

    def connect(self, link: SimLink) -> Connection:
        """Make a connection under a new identity."""
        self._count += 1
        connection = Connection(self, link, SessionId(b"s%d" % self._count))
        self.hub.peers[connection.session] = connection
        return connection

    def sent(self, name: str, frames: list[bytes], to_hub: bool) -> None:
        """Trace a message."""
        if self.trace is not None:
            self.trace(name, frames, to_hub)

    def cut(self, name: str) -> None:
        """Lose the connection of a process."""
        for connection in list(self.hub.peers.values()):
            if connection.link.process.name == name and connection.open:
                connection.lose()
