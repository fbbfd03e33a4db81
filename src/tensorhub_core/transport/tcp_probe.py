"""Try a listener's own addresses before they are told to anybody: one that leads nowhere from here leads nowhere."""

from __future__ import annotations

import contextlib
import errno
import os
import selectors
import socket
import time
from collections.abc import Sequence

from tensorhub_core.errors import TransportError
from tensorhub_core.observe.log import get_logger
from tensorhub_core.transport.tcp_addresses import new_selector
from tensorhub_core.transport.tcp_wire import Endpoint

PROBE_S = 1.0
"""How long all addresses together are tried: the kernel answers itself, whatever this process is doing."""
_UNDER_WAY = (errno.EINPROGRESS, errno.EALREADY)


def probe(endpoints: Sequence[Endpoint], timeout_s: float = PROBE_S) -> dict[Endpoint, str]:
    """Connect to each endpoint and hang up; return those that cannot be connected to, and why."""
    failures: dict[Endpoint, str] = {}
    end_s = time.monotonic() + timeout_s
    with contextlib.ExitStack() as opened, new_selector() as selector:
        for endpoint in endpoints:
            try:
                trying = opened.enter_context(
                    socket.socket(socket.AF_INET6 if ":" in endpoint.address else socket.AF_INET, socket.SOCK_STREAM)
                )
            except OSError:
                continue  # no file is left to find it out
            trying.setblocking(False)
            code = trying.connect_ex((endpoint.address, endpoint.port))
            if code in _UNDER_WAY:
                selector.register(trying, selectors.EVENT_WRITE, endpoint)
            elif code:
                failures[endpoint] = os.strerror(code)
        while selector.get_map() and (left_s := end_s - time.monotonic()) > 0:
            for key, _ in selector.select(left_s):
                selector.unregister(key.fileobj)
                code = key.fileobj.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)  # type: ignore[union-attr]
                if code:
                    failures[key.data] = os.strerror(code)
        failures |= {key.data: f"no answer within {timeout_s:g} s" for key in (selector.get_map() or {}).values()}
    return failures


def reached(
    listeners: Sequence[socket.socket], endpoints: tuple[Endpoint, ...], interface: str | None
) -> tuple[Endpoint, ...]:
    """Return the endpoints of listeners that can be connected to, with a warning that names the others.

    Nobody else knows of them yet: what is accepted here are our own calls. Raises TransportError if an interface was
    named and none of its addresses can be connected to.
    """
    failures = probe(endpoints)
    for listener in listeners:
        listener.setblocking(False)
        with contextlib.suppress(OSError):
            while True:
                listener.accept()[0].close()
    if not failures:
        return endpoints
    told = "; ".join(f"{endpoint}: {why}" for endpoint, why in failures.items())
    good = tuple(endpoint for endpoint in endpoints if endpoint not in failures)
    if interface is not None and not good:
        raise TransportError(
            f"the interface {interface!r} cannot be connected to, not even from this machine itself ({told}): look for "
            "a firewall, or choose another one by --interface or TENSORHUB_INTERFACE"
        )
    text = "addresses of this machine that cannot be connected to, even from itself, are not told to readers (%s)"
    get_logger("transport").warning(text + ": look for a firewall, or name an interface by --interface", told)
    return good or endpoints
