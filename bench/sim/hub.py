"""The hub: the real server machine behind a queue of one server; virtual time passes for each message it takes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

from bench.sim.assumptions import Assumptions
from bench.sim.events import Events

from tensorhub_core.ids import SessionId
from tensorhub_core.server.turns import Turn, Turns
from tensorhub_core.state.events import Event, Received, Send, Tick
from tensorhub_core.state.machine import step
from tensorhub_core.state.messages import Blob, Discard, Done, JoinRound, Ok, Promise, PutBlob, Relocate, Reply, Request
from tensorhub_core.state.records import MachineConfig, ServerState

Deliver = Callable[[SessionId, int, Reply], None]
_CHOOSES = (JoinRound, Relocate)


def is_told(request: int) -> bool:
    """Tell whether a request's answer does not matter; such requests have odd numbers, so that none is brought."""
    return request % 2 == 1


def _blob_bytes(message: Reply) -> int:
    """Return how many bytes of blobs an answer brings."""
    if isinstance(message, Blob):
        return len(message.data)
    return sum(map(len, message.blobs)) if isinstance(message, (Promise, Discard)) else 0


class Hub:
    """One server after the other. `deliver` is called with what a life of it says, when it has said it."""

    def __init__(self, events: Events, assumptions: Assumptions, deliver: Deliver, **config: Any) -> None:
        self.events, self.assumptions, self.deliver = events, assumptions, deliver
        a = assumptions
        self._config: dict[str, Any] = {
            "lease_s": a.lease_s.value,
            "heartbeat_s": a.heartbeat_s.value,
            "grace_s": a.grace_s.value,
        }
        self._config.update(config)
        self.epoch = 0
        self.alive = False
        self.busy_s = 0.0
        self.most_waiting_s = 0.0
        self.messages: Counter[str] = Counter()
        self._turns = Turns()
        self._came_s: dict[tuple[SessionId, int], float] = {}
        self._busy = self._ticks = False
        self.state: ServerState
        self.start()

    def start(self) -> None:
        """Begin a life that knows nothing."""
        self.epoch += 1
        self.alive = True
        self._turns, self._busy, self._ticks = Turns(), False, False
        self._came_s.clear()
        self.state = ServerState.new(MachineConfig(self.epoch, **self._config), self.events.now)
        self._watch(self.epoch)

    def kill(self) -> None:
        """End this life: what it has not taken is lost."""
        self.alive = False

    def receive(self, session: SessionId, request: int, message: Request) -> None:
        """Take a message when it is its turn (server/turns.py); to be called when it arrives."""
        if self.alive:
            self._came_s[session, request] = self.events.now
            self._turns.put(Turn(session, request, message, 0))
            if not self._busy:
                self._next(self.epoch)

    def _next(self, epoch: int) -> None:
        """Take the message whose turn it is, when the one before is done."""
        if epoch != self.epoch or not self.alive:
            return
        self._busy = True
        if self._ticks:
            self._ticks = False
            done_s = self._take(Tick(), self.assumptions.hub_tick_worker_s.value * len(self.state.workers))
        elif (turn := self._turns.take()) is not None:
            waited_s = self.events.now - self._came_s.pop((turn.session, turn.request))
            self.most_waiting_s = max(self.most_waiting_s, waited_s)
            done_s = self._take(Received(turn.session, turn.request, turn.message), self._cost(turn.message))
        else:
            self._busy = False
            return
        self.events.at(done_s, self._next, epoch)

    def _cost(self, message: Request) -> float:
        a = self.assumptions
        cost = a.hub_message_s.value
        if isinstance(message, _CHOOSES):
            cost += a.hub_join_s.value
        elif isinstance(message, PutBlob):
            cost += len(message.data) / a.hub_bytes_per_s.value
        elif isinstance(message, Done):
            cost += a.hub_push_s.value
        self.messages[type(message).__name__] += 1
        return cost

    def _take(self, event: Event, cost_s: float) -> float:
        """Decide now, and say it when the time of the decision has passed; return when the next one may be taken."""
        now = self.events.now
        done_s = now + cost_s
        self.state, effects = step(self.state, event, done_s)
        for effect in effects:
            if not isinstance(effect, Send):
                continue
            message = effect.message
            if effect.request == 0:
                done_s += self.assumptions.hub_push_s.value
                self.messages[type(message).__name__] += 1
            else:
                done_s += _blob_bytes(message) / self.assumptions.hub_bytes_per_s.value
            if not (isinstance(message, Ok) and is_told(effect.request)):
                self.events.at(done_s, self._say, self.epoch, effect)
        self.busy_s += done_s - now
        return done_s

    def _say(self, epoch: int, effect: Send) -> None:
        if epoch == self.epoch and self.alive:
            self.deliver(effect.session, effect.request, effect.message)

    def _watch(self, epoch: int) -> None:
        if epoch != self.epoch or not self.alive:
            return
        if self.state.next_deadline(self.events.now) is not None:
            self._ticks = True
            if not self._busy:
                self._next(epoch)
        step_s = min(self.state.config.heartbeat_s, self.state.config.lease_s / 4)
        self.events.at(self.events.now + step_s, self._watch, epoch)
