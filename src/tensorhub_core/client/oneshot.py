"""Ask the reference server one question, without a thread: for commands that look and leave."""

from __future__ import annotations

import contextlib
import itertools
import secrets
import time
from collections.abc import Iterable

from tensorhub_core.client.link import Link, LinkEvent
from tensorhub_core.client.search import Search, parse_addresses
from tensorhub_core.errors import ProtocolMismatch, ServerUnreachable, TensorHubError, error_from_wire
from tensorhub_core.state.messages import PROTOCOL, Failure, Hello, Leave, Reply, Request, Welcome
from tensorhub_core.wire.codec import MalformedMessage, decode_reply, encode, split
from tensorhub_core.wire.curve import ClientKeys

OBSERVER = "observer"
_LEAVE_S = 0.2
_LOOK_EVERY_S = 0.1


def ask(
    server: str | Iterable[str],
    message: Request,
    *,
    timeout_s: float = 10.0,
    model: str = OBSERVER,
    keys: ClientKeys | None = None,
) -> Reply:
    """Say hello as an observer of `model`, send one request and return its reply; the first server that answers counts.

    Raises ServerUnreachable naming the addresses after `timeout_s`, ProtocolMismatch if the server is of another
    release, ConfigError if an address is impossible, and the error that the server answers with. Any thread.
    """
    addresses = parse_addresses(server)
    question = _Question(addresses, timeout_s, keys)
    try:
        welcome = question.welcome(Hello(PROTOCOL, secrets.token_hex(16), model, OBSERVER, observer=True))
        if not isinstance(welcome, Welcome):
            raise TensorHubError(f"the server at {question.address} answered a hello with {type(welcome).__name__}")
        reply = question.exchange(message)
        question.leave()
        return reply
    finally:
        question.close()


class _Question:
    """A connection to whichever address answers, until the deadline."""

    def __init__(self, addresses: tuple[str, ...], timeout_s: float, keys: ClientKeys | None) -> None:
        now = time.monotonic()
        self._timeout_s, self._end_s = timeout_s, now + timeout_s
        self._search = Search(addresses, now)
        self._numbers = itertools.count(1)
        self._link = Link(addresses, keys)

    @property
    def address(self) -> str:
        return self._link.address

    def welcome(self, hello: Hello) -> Reply:
        """Return the answer to a hello, said at every address that lets us in until one answers."""
        hello_number = 0
        while True:
            self._wait(self._end_s)
            now = time.monotonic()
            for event in self._link.events():
                if event is LinkEvent.UP:
                    self._search.up(now)
                    hello_number = next(self._numbers)
                    self._link.send(encode(hello_number, hello))
                elif event is not LinkEvent.REFUSED or len(self._search.addresses) > 1:
                    self._search.turned_away(now)
            reply = self._answer_to(hello_number)
            if reply is not None:
                return reply
            if self._search.due(now):
                self._link.renew(self._search.next(now))

    def exchange(self, message: Request) -> Reply:
        """Send a request and return its reply; raises ServerUnreachable if the connection is lost meanwhile."""
        number = next(self._numbers)
        self._link.send(encode(number, message))
        while (reply := self._answer_to(number)) is None:
            self._wait(self._end_s)
            if any(event is not LinkEvent.UP for event in self._link.events()):
                raise self._unreachable()
        return reply

    def leave(self) -> None:
        """Say goodbye; bounded, and nothing follows from it if it is not heard."""
        self._end_s = min(self._end_s, time.monotonic() + _LEAVE_S)
        with contextlib.suppress(TensorHubError):
            self.exchange(Leave())

    def close(self) -> None:
        self._link.close()

    def _wait(self, end_s: float) -> None:
        left_s = end_s - time.monotonic()
        if left_s <= 0:
            raise self._unreachable()
        self._link.wait(min(left_s, _LOOK_EVERY_S))

    def _unreachable(self) -> ServerUnreachable:
        return ServerUnreachable(
            f"no answer from {' or '.join(self._search.addresses)} within {self._timeout_s:g} s ({self._link.trouble}):"
            " check the address, or start `tensorhub serve`"
        )

    def _answer_to(self, number: int) -> Reply | None:
        """Return the reply to a request if it has arrived; pushes and stray replies are skipped."""
        while (raw := self._link.receive()) is not None:
            try:
                frames = split(raw)
                reply = decode_reply(frames)
            except (ProtocolMismatch, MalformedMessage) as error:
                raise type(error)(f"the server at {self.address} does not fit: {error}") from None
            if frames.request != number:
                continue
            if isinstance(reply, Failure):
                raise error_from_wire(reply.code, reply.message, reply.differences)
            return reply
        return None
