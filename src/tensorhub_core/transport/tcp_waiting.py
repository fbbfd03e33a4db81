"""Wait for connections to peers: for the first one that opens, and for bytes on any of several."""

from __future__ import annotations

import select
import time
from collections.abc import Sequence

from tensorhub_core.clock import Clock
from tensorhub_core.errors import TransportError
from tensorhub_core.transport.tcp_addresses import new_selector
from tensorhub_core.transport.tcp_reading import WAIT_S, TcpConnection
from tensorhub_core.transport.tcp_wire import Endpoint

_SELECT_S = 0.1


def connect_first(
    groups: Sequence[Sequence[Endpoint]], agent: str, secret: bytes, clock: Clock, timeout_s: float
) -> TcpConnection:
    """Return the first open connection to an agent, from the first group of endpoints that has one.

    Raises TransportError, which names what was tried, when `timeout_s` has been waited; pauses of this process do not
    count.
    """
    waiting = _Waiting(clock, timeout_s)
    failures: list[str] = []
    for group in groups:
        found = _first_open(group, agent, secret, clock, waiting, failures)
        if found is not None:
            return found
    tried = "; ".join(failures) or "it can be reached from its own machine only"
    raise TransportError(f"the source {agent!r} cannot be reached: {tried}")


class _Waiting:
    """The time that is left to wait for a peer."""

    def __init__(self, clock: Clock, timeout_s: float) -> None:
        self._clock = clock
        self.left_s = timeout_s

    def wait(self, connections: Sequence[TcpConnection]) -> None:
        """Wait until one of them can be driven on, and count that time.

        When this process did not run meanwhile, what has come lies there unseen: that is no silence of the peer's.
        """
        began = self._clock.now()
        _wait(connections, min(_SELECT_S, self.left_s))
        self.left_s = max(0.0, self.left_s - min(self._clock.now() - began, 2 * _SELECT_S))


def _first_open(
    group: Sequence[Endpoint], agent: str, secret: bytes, clock: Clock, waiting: _Waiting, failures: list[str]
) -> TcpConnection | None:
    timeout_s = waiting.left_s
    trying: list[TcpConnection] = []
    try:
        for endpoint in group:
            trying.append(TcpConnection(endpoint, agent, secret, clock, timeout_s))
        while trying:
            opened = next((connection for connection in trying if connection.opened), None)
            if opened is not None:
                trying.remove(opened)
                return opened
            for connection in [connection for connection in trying if connection.closed]:
                failures.append(f"{connection.endpoint}: {connection.error}")
                trying.remove(connection)
            waiting.wait(trying)
            for connection in trying:
                connection.drive()
                if not waiting.left_s and not connection.opened:
                    connection.fail(f"no answer within {timeout_s:.1f} s")
    finally:
        for connection in trying:
            connection.fail("another address was faster")
    return None


def wait_for_bytes(connections: Sequence[TcpConnection]) -> bool:
    """Wait some milliseconds for bytes on one of some connections; False if there is no sense in it.

    Those of a single one are received. With several, each would wait for its own bytes while others have theirs.
    """
    if not connections or not all([connection.expect_bytes() for connection in connections]):
        return False
    began = time.monotonic()
    if len(connections) == 1:
        connections[0].wait()
    else:
        poller = select.poll()
        for connection in connections:
            poller.register(connection, select.POLLIN)
        poller.poll(1000 * WAIT_S)
    for connection in connections:
        connection.waited(time.monotonic() - began)
    return True


def _wait(connections: Sequence[TcpConnection], timeout_s: float) -> None:
    """Wait until one of them can be driven on."""
    with new_selector() as selector:
        for connection in connections:
            selector.register(connection, connection.awaited_events())
        selector.select(timeout_s)
