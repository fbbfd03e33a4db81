"""Talk with the reference server: one thread that owns the connection, keeps it alive and says hello again if need be.

Requests are numbered once and keep their number when they are sent again. After every hello but the first, *durable*
requests that are still open are sent again; the others belong to a round that the server may not know any more, and so
to one *life* of the session: they are forgotten, and whoever asked hears of it through `on_reopened`.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import TimeoutError as FutureTimeout

from tensorhub_core.client.awaiting import Awaited
from tensorhub_core.client.identity import Identity, Listener, Standing, checked, hello_of, same_error
from tensorhub_core.client.link import Link, LinkEvent
from tensorhub_core.client.pending import OpenRequest, Pending
from tensorhub_core.client.search import Search, parse_addresses
from tensorhub_core.clock import Deadline
from tensorhub_core.errors import (
    DeadlineExceeded,
    ProtocolMismatch,
    ServerUnreachable,
    StateError,
    TensorHubError,
    error_from_wire,
)
from tensorhub_core.ids import VersionKey
from tensorhub_core.limits import start_thread
from tensorhub_core.observe.log import get_logger
from tensorhub_core.state.messages import (
    Available,
    Ended,
    Failure,
    Heartbeat,
    Held,
    Leave,
    NothingNewer,
    Promise,
    PutBlob,
    Reply,
    Request,
    Superseded,
    UnknownSession,
    Welcome,
)
from tensorhub_core.wire.codec import MalformedMessage, decode_reply, encode, split
from tensorhub_core.wire.curve import ClientKeys

Answer = Callable[[Reply], None]
_HELLO_AGAIN_S = 1.0
_JOIN_S = 10.0


class Session:
    """A worker's connection. `request` and `submit` may be called from any thread; answers come on the session's."""

    def __init__(
        self,
        server: str | Iterable[str],
        identity: Identity,
        listener: Listener,
        *,
        keys: ClientKeys | None = None,
        resolve: Callable[[float], str] | None = None,
    ) -> None:
        """Start the thread; the first of the server's addresses that answers is taken, after a loss all are tried.

        `resolve(timeout_s)` names the address again after a loss (an embedded server moves). Raises ConfigError if an
        address is malformed.
        """
        addresses = parse_addresses(server)
        self._identity, self._listener, self._resolve = identity, listener, resolve
        self.standing = Standing()
        self.staging: tuple[Request, ...] = ()
        """What a server that does not know the worker is told of its staging memory, after `standing`."""
        self.offloads: tuple[tuple[Held, ...], tuple[PutBlob, ...]] = ((), ())
        """The offload copies that a hello names, and their blobs; replaced as a whole."""
        self.high: tuple[int, int] | None = None
        self.created: VersionKey | None = None
        """The newest version that the worker created: a server that has restarted takes none before it (law L10)."""
        self.ended: Ended | None = None
        """How the worker's last round ended, for shards that have not heard it."""
        self.hellos = 0
        self._link = Link(addresses, keys)
        self._search = Search(addresses, time.monotonic(), elsewhere=resolve is not None)
        self._numbers = itertools.count(1)
        self._pending = Pending()
        self._commands: deque[tuple[int, OpenRequest | None]] = deque()
        self._lock = threading.RLock()  # a signal handler may call what it has interrupted
        self._over: TensorHubError | None = None
        self._welcome: Awaited[Welcome] = Awaited()
        self._hello: int | None = None
        self._greeted = False
        self._hello_due_s = self._heartbeat_due_s = 0.0
        self._heartbeat_s = 1.0
        self._heard_s = time.monotonic()
        self._greet_again = False
        self._leaving = self._stopping = False
        self.pid = os.getpid()
        self._thread = threading.Thread(target=self._run, name="tensorhub-session", daemon=True)
        try:
            start_thread(self._thread)
        except TensorHubError:
            self._link.close()
            raise

    @property
    def address(self) -> str:
        """Return the address of the server, or that where it is looked for at the moment."""
        return self._link.address

    @property
    def addresses(self) -> tuple[str, ...]:
        """Return all addresses at which the server may be."""
        return self._search.addresses

    def silent_s(self) -> float:
        """Return the seconds since the server was heard last."""
        return time.monotonic() - self._heard_s

    def answers(self) -> bool:
        """Tell whether the server answers: it greeted this session and was heard within a few heartbeats."""
        return self._greeted and self.silent_s() < max(3 * self._heartbeat_s, 1.0)

    def open(self, timeout_s: float) -> Welcome:
        """Wait for the server's welcome; raises ServerUnreachable, or the error that the server refuses with."""
        try:
            return self._welcome.result(timeout_s)
        except FutureTimeout:
            raise ServerUnreachable(
                f"no answer from {self._named()} within {timeout_s:g} s ({self._link.trouble}): check the address, or "
                "start `tensorhub serve`"
            ) from None

    def request(self, message: Request, deadline: Deadline) -> Reply:
        """Send a durable request and return its reply.

        Raises the error that the server refuses with; when the deadline passes, ServerUnreachable if the server has
        not been heard for a while, else DeadlineExceeded.
        """
        future: Awaited[Reply] = Awaited()
        number = self.submit(message, future.set_result)
        try:
            return checked(self.result(future, deadline, type(message).__name__))
        except BaseException:
            self.forget(number)
            raise

    def result(self, future: Awaited[Reply], deadline: Deadline, what: str) -> Reply:
        """Wait for a reply that a `submit` will put into `future`; raises like `request` when the deadline passes."""
        left_s = None if deadline.at_s is None else max(0.0, deadline.at_s - time.monotonic())
        try:
            return future.result(left_s)
        except FutureTimeout:
            raise self.late(what) from None

    def late(self, what: str) -> TensorHubError:
        """Return the error of a call whose deadline passed."""
        if self.answers():
            return DeadlineExceeded(f"{what} was not finished by its deadline; the server at {self.address} answers")
        return ServerUnreachable(
            f"{what} was not finished by its deadline: {self._named()} has been silent for {self.silent_s():.1f} s "
            f"({self._link.trouble})"
        )

    def _named(self) -> str:
        return " or ".join(self.addresses if len(self.addresses) > 1 else (self.address,))

    def submit(self, message: Request, answer: Answer, *, life: int | None = None) -> int:
        """Send a request and return its number; `answer` hears its reply on the session's thread.

        A request with a `life` is forgotten at the next welcome, and at once if that has come already. Raises the
        error that ended the session, or MalformedMessage if the request is too large.
        """
        self.check_alive()
        number = next(self._numbers)
        entry = OpenRequest(encode(number, message), answer, life)
        with self._lock:
            if self._over is not None:
                raise same_error(self._over)
            self._commands.append((number, entry))
        self._link.wake()
        return number

    def tell(self, message: Request, life: int) -> None:
        """Send a request of a round whose reply does not matter."""
        self.submit(message, lambda _: None, life=life)

    def forget(self, number: int) -> None:
        """Not wait for a reply any more."""
        # In a forked child nobody may be there to free the lock.
        if os.getpid() == self.pid:
            with self._lock:
                if self._over is None:
                    self._commands.append((number, None))

    def say_hello_again(self) -> None:
        """Ask for a new welcome, as after a lost connection."""
        self._greet_again = True
        self._link.wake()

    def offer_nothing(self) -> None:
        """Not say any more that a copy is offered: it is withdrawn."""
        self.standing = Standing(None, self.standing.blobs, self.standing.register)

    def check_alive(self) -> None:
        """Raise StateError in a forked child, which has the object but neither the thread nor the connection."""
        if os.getpid() != self.pid:
            raise StateError("this worker was connected before a fork: connect() again in the child process")

    def leave(self, timeout_s: float) -> None:
        """Tell the server that the worker leaves for good, without a word after it that would bring it back."""
        self._leaving = True
        with contextlib.suppress(TensorHubError):
            self.request(Leave(), Deadline.after(timeout_s, time.monotonic()))

    def close(self) -> None:
        """End the connection at once and join the thread; open requests fail. Idempotent."""
        if os.getpid() != self.pid:
            return
        self._stopping = True
        self._link.wake()
        if threading.current_thread() is not self._thread:
            self._thread.join(_JOIN_S)

    # --- the session's thread ---------------------------------------------------------------------------------------

    def _run(self) -> None:
        error: TensorHubError = StateError("the worker is closed")
        try:
            while not self._stopping:
                self._turn()
        except _Over as over:
            error = over.error
        except Exception as fault:
            get_logger("client").exception("the session with %s died", self.address)
            error = TensorHubError(f"the session with {self.address} died: {type(fault).__name__}: {fault}")
        finally:
            self._end(error)

    def _turn(self) -> None:
        """Wait for something to do and do it."""
        now = time.monotonic()
        due_s = self._heartbeat_due_s if self._greeted else self._hello_due_s
        wait_s = min(0.5, due_s - now) if self._link.connected else 0.1
        busy = bool(self._commands) or (self._greet_again and self._greeted)
        self._link.wait(0.0 if busy else max(0.0, wait_s), writable=self._pending.unsent and self._greeted)
        for event in self._link.events():
            self._note(event, time.monotonic())
        while (frames := self._link.receive()) is not None:
            self._handle(frames)
        if self._greet_again and self._greeted:
            self._greet_again = False
            self._say_hello()
        self._take_commands()
        if self._greeted:
            self._pending.send(self._link.send)
        self._keep_alive(time.monotonic())

    def _note(self, event: LinkEvent, now: float) -> None:
        if event is LinkEvent.UP:
            self._search.up(now)
            self._say_hello()
            return
        self._greeted, self._hello = False, None
        if event is LinkEvent.DOWN:
            self._search.lost(now)
        elif event is LinkEvent.REJECTED or len(self.addresses) > 1:
            self._search.turned_away(now)

    def _say_hello(self) -> None:
        """Say who we are and what we hold; the answer is the welcome."""
        self._greeted = False
        self._hello = next(self._numbers)
        about = (self.high, self.offloads[0], self._search.epoch, self.ended, self.created)
        hello = hello_of(self._identity, self.standing, *about)
        self._link.send(encode(self._hello, hello))
        self._search.asked(time.monotonic())
        self._hello_due_s = time.monotonic() + _HELLO_AGAIN_S

    def _handle(self, frames: list[bytes]) -> None:
        try:
            header = split(frames)
            reply = decode_reply(header)
        except ProtocolMismatch as error:
            raise _Over(ProtocolMismatch(f"the server at {self.address} does not fit: {error}")) from None
        except MalformedMessage as error:
            self._link.trouble = f"it answers, but not as a TensorHub server: {error}"
            return
        if isinstance(reply, Welcome | UnknownSession) and not self._search.accepts(reply.server_epoch):
            self._link.trouble = f"server epoch {reply.server_epoch} is over: {self._search.epoch} was heard of"
            self._greeted, self._hello = False, None
            self._search.turned_away(time.monotonic())
            return
        self._heard_s = time.monotonic()
        self._search.heard()
        if isinstance(reply, Promise | NothingNewer | Available):
            self.high = max(self.high or (reply.epoch, reply.number), (reply.epoch, reply.number))
        if isinstance(reply, Superseded):
            raise _Over(StateError(f"{reply.message}: this worker's session is over"))
        if header.request == self._hello and self._hello is not None:
            self._greet(reply)
        elif header.request:
            self._pending.answer(header.request, reply)
        elif isinstance(reply, UnknownSession):
            if self._greeted and not self._leaving:
                self._say_hello()
        else:
            self._listener.on_push(reply)

    def _greet(self, reply: Reply) -> None:
        """Take the answer to a hello."""
        self._hello = None
        if not isinstance(reply, Welcome):
            error = TensorHubError(f"{self.address} answered a hello with {type(reply).__name__}")
            if isinstance(reply, Failure):
                error = error_from_wire(reply.code, f"{self.address} refuses this worker: {reply.message}")
            raise _Over(error)
        self.hellos += 1
        self._heartbeat_s = reply.heartbeat_s
        again = self._welcome.done()
        self._search.welcomed(reply.lease_s)
        self._link.most_pause_s = self._search.most_pause_s  # from the next loss on
        self._pending.begin(self.hellos, self._standing_requests() if again else {})
        self._greeted = True
        if again:
            get_logger("client").info("said hello again to %s (server epoch %d)", self.address, reply.server_epoch)
            self._listener.on_reopened(reply, self.hellos)
        else:
            self._welcome.set_result(reply)

    def _standing_requests(self) -> dict[int, OpenRequest]:
        standing = self.standing
        messages: list[Request] = [*standing.blobs, *self.offloads[1]]
        if standing.register is not None:
            messages.append(standing.register)
            messages += self.staging
        requests: dict[int, OpenRequest] = {}
        for message in messages:
            number = next(self._numbers)
            requests[number] = OpenRequest(encode(number, message), self._check_standing, self.hellos)
        return requests

    def _check_standing(self, reply: Reply) -> None:
        if isinstance(reply, Failure):
            get_logger("client").warning("%s did not take back what this worker holds: %s", self.address, reply.message)

    def _take_commands(self) -> None:
        while self._commands:
            number, entry = self._commands.popleft()
            if entry is None:
                self._pending.forget(number)
            elif not entry.stale(self.hellos):
                self._pending.add(number, entry)

    def _keep_alive(self, now: float) -> None:
        if self._greeted and now >= self._heartbeat_due_s:
            self._heartbeat_due_s = now + self._heartbeat_s
            if not self._leaving and self._link.send(encode(next(self._numbers), Heartbeat())):
                self._search.asked(now)
        elif self._link.connected and not self._greeted and now >= self._hello_due_s:
            self._say_hello()
        if self._search.due(now):
            self._look_for_server(now)

    def _look_for_server(self, now: float) -> None:
        """Connect anew: where the server was, or where else it may be."""
        self._greeted, self._hello = False, None
        address = self._search.next(now)
        try:
            if address is not None and self._resolve is not None:
                address = self._resolve(5.0)
            self._link.renew(address)
        except TensorHubError as error:
            self._link.trouble = str(error)

    def _end(self, error: TensorHubError) -> None:
        with self._lock:
            self._over = error
        self._take_commands()
        self._link.close()
        if not self._welcome.done():
            self._welcome.set_exception(same_error(error))
        failure = Failure(error.code, str(error))
        self._pending.fail(failure)
        self._listener.on_over(error)


class _Over(Exception):
    """The session cannot go on."""

    def __init__(self, error: TensorHubError) -> None:
        super().__init__(str(error))
        self.error = error
