"""Run the server machine: one thread, one ROUTER socket, and no decision of its own.

A message becomes an event, an effect becomes a message; time reaches the machine as `Tick` when it asked for one.
Whatever a peer sends, the loop goes on: malformed input is dropped or answered, an exception of the machine is answered
with a failure, logged and counted, and a receiver that does not read is reported to the machine as disconnected.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
from collections.abc import Callable

import zmq

from tensorhub_core.clock import Clock
from tensorhub_core.errors import ProtocolMismatch, StateError, TensorHubError
from tensorhub_core.ids import SessionId
from tensorhub_core.limits import ZMQ_FILES, check_files
from tensorhub_core.observe.log import get_logger
from tensorhub_core.server.counters import Counters, RateLimitedLog
from tensorhub_core.server.gate import Gate
from tensorhub_core.server.journal import Journal
from tensorhub_core.server.options import bind_router, is_open
from tensorhub_core.server.outbox import Delivery, Outbox
from tensorhub_core.server.pace import Pace
from tensorhub_core.server.turns import Turn, Turns
from tensorhub_core.state.events import Disconnected, Drop, Effect, Event, Log, Received, Send, Tick
from tensorhub_core.state.events import Outdated as Stop
from tensorhub_core.state.machine import step
from tensorhub_core.state.messages import PROTOCOL, Failure, Hello, Reply
from tensorhub_core.state.records import MachineConfig, ServerState
from tensorhub_core.wire.codec import MalformedMessage, decode_request, split
from tensorhub_core.wire.curve import ServerKeys

Watch = Callable[[float], bool]
"""Asked now and then with the monotonic time; True ends the loop."""

BATCH = 256
"""Messages taken between two looks at the clock."""
WATCH_EVERY_S = 0.25
FAILED_TICK_PAUSE_S = 0.1
MACHINE_LINES = 200
"""Lines of one level that the machine may log in five seconds: clients that come and go must not fill a disk."""
MOST_WAIT_S = 10.0
OPEN = "%s can be reached from other machines, by anybody: set curve_secret and curve_clients (`tensorhub keygen`)"
_FRAMES_OF_A_MESSAGE = 2
_NOBLOCK = int(zmq.NOBLOCK)
"""As a plain number: to combine and convert the enumeration's costs as much as to receive a frame."""
_LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}


class Outdated(StateError):
    """A client has heard of a later life of the server: this one decides nothing any more."""

    def __init__(self, own: int, heard: int) -> None:
        super().__init__(
            f"a worker has heard of server epoch {heard}, and this server's is {own}: a later one serves, so that this"
            " one stops (or this machine's clock went back: start it again later, or with --lock)"
        )
        self.heard = heard


class ServerLoop:
    """The reference server in the calling thread: construct (binds), `run` until `stop`, `close`.

    `stop` may be called from any thread and from signal handlers; everything else belongs to one thread at a time.
    Raises AddressInUse or ConfigError naming the address if it cannot be bound, TransportError if files run out.
    """

    def __init__(
        self,
        config: MachineConfig,
        bind: str,
        *,
        clock: Clock,
        logger: logging.Logger | None = None,
        keys: ServerKeys | None = None,
        journal: Journal | None = None,
    ) -> None:
        self.counters = Counters()
        self.state = ServerState.new(config, clock.now())
        self._clock = clock
        self._logger = logger or get_logger("server")
        self._limited = RateLimitedLog(self._logger)
        self._tick_at: float | None = None
        self._tick_not_before = clock.now()
        check_files(ZMQ_FILES, f"a server at {bind}")
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._gate = None if keys is None else Gate(self._context, keys, self._limited)
        try:
            self._bound = bind_router(self._context, bind, keys)
        except BaseException:
            if self._gate is not None:
                self._gate.close()
            self._context.term()
            raise
        self._router = self._bound.socket
        if self._gate is not None:
            self._gate.watch(self._router)
        elif is_open(self.address):
            self._logger.warning(OPEN, self.address)
        self._journal = journal
        if journal is not None:
            journal.begin(config, self.state.started_s)
        self._outdated_by: int | None = None
        self._outbox = Outbox(self._router)
        self._pace = Pace()
        self._turns = Turns()
        self._stopping = False
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_write, False)

    @property
    def address(self) -> str:
        """Return the address that clients connect to, with the real port."""
        return self._bound.address

    def stop(self) -> None:
        """Make `run` return soon; any thread, any number of times."""
        self._stopping = True
        with contextlib.suppress(OSError):
            os.write(self._wake_write, b"x")

    def run(self, watch: Watch | None = None) -> None:
        """Serve until `stop` is called or `watch` says so; raises Outdated when a client knows a later server."""
        poller = zmq.Poller()
        if self._gate is not None:
            self._gate.register(poller)
        poller.register(self._router, zmq.POLLIN)
        poller.register(self._wake_read, zmq.POLLIN)
        watch_at = self._clock.now()
        while not self._stopping:
            poller.poll(self._timeout_ms(None if watch is None else watch_at))
            now = self._clock.now()
            if watch is not None and now >= watch_at:  # first, so that nothing is decided after a long pause
                watch_at = now + WATCH_EVERY_S
                if watch(now):
                    return
            if self._gate is not None:
                self._gate.turn(now)
            taken, now = self._receive_batch(), self._clock.now()
            self._tick_if_due(now)
            pause_s = self._pace.pause_s(len(self.state.workers), taken, now)
            if pause_s:
                select.select((self._wake_read,), (), (), pause_s)  # stop() ends it
        if self._outdated_by is not None:
            raise Outdated(self.state.config.server_epoch, self._outdated_by)

    def workers(self) -> int:
        """Return how many workers (observers not counted) the server knows."""
        return sum(not worker.observer for worker in self.state.workers.values())

    def close(self) -> None:
        """Close the socket; what was not sent yet is lost. Idempotent, after `run` has returned."""
        if self._wake_read < 0:
            return
        if self._gate is not None:
            self._gate.close()
        self._bound.close()
        self._context.term()
        if self._journal is not None:
            self._journal.close()
        os.close(self._wake_read)
        os.close(self._wake_write)
        self._wake_read = -1

    def _timeout_ms(self, watch_at: float | None) -> int:
        if self._turns:
            return 0
        now = self._clock.now()
        wait = MOST_WAIT_S
        if self._tick_at is not None:
            wait = min(wait, max(self._tick_at, self._tick_not_before) - now)
        if watch_at is not None:
            wait = min(wait, watch_at - now)
        return int(wait * 1000) + 1 if wait > 0 else 0

    def _tick_if_due(self, now: float) -> None:
        if self._tick_at is None or now < max(self._tick_at, self._tick_not_before):
            return
        self._tick_at = None
        errors = self.counters.errors
        self._step(Tick())
        if self.counters.errors > errors:
            self._tick_not_before = self._clock.now() + FAILED_TICK_PAUSE_S
        self._outbox.sweep(now)

    # --- receiving ----------------------------------------------------------------------------------------------

    def _receive_batch(self) -> int:
        """Take the messages that are there, so many at the most; return how many there were."""
        taken = 0
        while taken < BATCH and not self._stopping:
            self._look_ahead()
            turn = self._turns.take()
            if turn is None:
                break
            taken += 1
            self._step(Received(turn.session, turn.request, turn.message))
        return taken

    def _look_ahead(self) -> None:
        """Read messages for as long as only such wait that take long, so many at the most."""
        for _ in range(BATCH):
            if not self._turns.wants:
                return
            try:
                identity = self._router.recv(_NOBLOCK)
                frames = self._rest_of_message()
            except zmq.Again:
                return
            self.counters.received += 1
            self._read(SessionId(identity), frames)

    def _rest_of_message(self) -> list[bytes]:
        """Return the frames after the identity, of which there is at least one; those that no message has are read
        but not kept.
        """
        frame = self._router.recv(_NOBLOCK, copy=False)
        frames = [frame.bytes]
        while frame.more:  # cheaper to ask than the socket
            frame = self._router.recv(_NOBLOCK, copy=False)
            if len(frames) <= _FRAMES_OF_A_MESSAGE:
                frames.append(frame.bytes)
        return frames

    def _read(self, session: SessionId, frames: list[bytes]) -> None:
        """Let one message wait for its turn; never raises for what a peer sent."""
        request = 0
        try:
            header = split(frames)
            if header.request == 0:
                raise MalformedMessage("request number 0 belongs to pushes")
            request = header.request
            message = decode_request(header)
        except ProtocolMismatch:
            self.counters.mismatched += 1
            text = f"the client speaks protocol {header.protocol}, this server speaks {PROTOCOL}: run the same release"
            self._limited.log("mismatch", logging.WARNING, text, self._clock.now())
            self._answer(session, request, Failure(ProtocolMismatch.code, text), self._clock.now())
        except MalformedMessage as error:
            self.counters.malformed += 1
            self._limited.log("malformed", logging.WARNING, f"dropped a message: {error}", self._clock.now())
            if request:
                self._answer(session, request, Failure(error.code, str(error)), self._clock.now())
        else:
            self.counters.hellos += isinstance(message, Hello) and not message.observer
            self._turns.put(Turn(session, request, message, len(header.body)))

    # --- stepping and sending -----------------------------------------------------------------------------------

    def _step(self, event: Event) -> None:
        """Take one step and carry out its effects; sessions that cannot be reached become events of their own."""
        lost: set[SessionId] = set()
        events = [event]
        for current in events:  # it grows on the way
            now = self._clock.now()
            if self._journal is not None:
                self._journal.append(now, current, self.state.counter)
            try:
                self.state, effects = step(self.state, current, now)
            except Exception as error:  # no message may end the server; the counter makes the fault visible
                effects = self._step_failed(current, error)
            for effect in effects:
                if not isinstance(effect, Send):
                    self._carry_out(effect, now)
                elif (
                    not self._answer(effect.session, effect.request, effect.message, now) and effect.session not in lost
                ):
                    lost.add(effect.session)
                    events.append(Disconnected(effect.session))
        # A deadline moves later by a tick only: with steady traffic it would otherwise never come.
        if self._tick_at is None:
            self._tick_at = self.state.next_deadline(self._clock.now())

    def _step_failed(self, event: Event, error: Exception) -> list[Effect]:
        self.counters.errors += 1
        what = type(event.message).__name__ if isinstance(event, Received) else type(event).__name__
        text = f"internal error on {what}: {type(error).__name__}: {error}"
        self._limited.log(f"error {what} {type(error).__name__}", logging.ERROR, text, self._clock.now(), trace=True)
        if not isinstance(event, Received):
            return []
        return [Send(event.session, event.request, Failure(TensorHubError.code, f"the server had an {text}"))]

    def _carry_out(self, effect: Drop | Log | Stop, now: float) -> None:
        """Carry out an effect that sends nothing."""
        if isinstance(effect, Drop):
            self._outbox.forget(effect.session)
        elif isinstance(effect, Log):
            level = _LEVELS.get(effect.level, logging.INFO)
            self._limited.log(f"machine {effect.level}", level, effect.text, now, most=MACHINE_LINES)
        else:
            self._outdated_by, self._stopping = effect.epoch, True

    def _answer(self, session: SessionId, request: int, message: Reply, now: float) -> bool:
        """Send a message if its receiver is there and reads; tell whether it was sent."""
        try:
            delivery = self._outbox.send(session, request, message, now)
        except MalformedMessage as error:
            self.counters.errors += 1
            self._limited.log("too large", logging.ERROR, str(error), now)
            delivery = self._outbox.send(session, request, Failure(TensorHubError.code, str(error)), now)
        if delivery is Delivery.SENT:
            self.counters.sent += 1
            return True
        if delivery is Delivery.SLOW:
            self.counters.slow += 1
            self._limited.log("slow", logging.WARNING, "a client does not read its replies: taken for gone", now)
        else:
            self.counters.gone += 1
        self._outbox.forget(session)
        return False
