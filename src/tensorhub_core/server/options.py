"""Turn settings into the machine's constants, and an address into a bound socket with bounded queues."""

from __future__ import annotations

import errno
import os
import socket
from dataclasses import dataclass
from pathlib import Path

import zmq

from tensorhub_core.config import ServerConfig
from tensorhub_core.errors import AddressInUse, ConfigError
from tensorhub_core.schedule.policy import policy_of
from tensorhub_core.server.files import accepts, free_lock, take_lock
from tensorhub_core.state.records import MachineConfig
from tensorhub_core.wire.codec import MAX_MESSAGE_BYTES
from tensorhub_core.wire.curve import ServerKeys, guard

RECEIVE_QUEUE = 32
"""Complete messages read ahead from one connection: a flood is held back by TCP, not stored."""
SEND_QUEUE = 512
"""Messages waiting for one slow receiver before it counts as gone."""
DEAD_AFTER_LEASES = 3.0


def machine_config(server: ServerConfig, server_epoch: int) -> MachineConfig:
    """Return the machine's constants for one server life; raises ConfigError for impossible `retain_models`."""
    return MachineConfig(
        server_epoch=server_epoch,
        lease_s=server.lease_s,
        heartbeat_s=server.heartbeat_s,
        grace_s=server.lease_s if server.grace_s is None else server.grace_s,
        dead_after_s=DEAD_AFTER_LEASES * server.lease_s,
        policy=policy_of(server.policy),
        retain=server.retain,
        retain_models=retained_by_model(server.retain_models),
    )


def is_open(address: str) -> bool:
    """Tell whether others than this machine's processes can reach a bound address."""
    host = address.removeprefix("tcp://").rpartition(":")[0].strip("[]")
    return address.startswith("tcp://") and not (host.startswith("127.") or host in ("::1", "localhost"))


def retained_by_model(text: str) -> tuple[tuple[str, int], ...]:
    """Read `retain_models`: NAME=N for models of their own, between commas; raises ConfigError naming the part."""
    found: dict[str, int] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, equals, number = (piece.strip() for piece in part.rpartition("="))
        if not (name and equals and number.isascii() and number.isdecimal()):
            raise ConfigError(f"retain_models must be NAME=N with N of at least 0, between commas, not {part!r}")
        if found.setdefault(name, int(number)) != int(number):
            raise ConfigError(f"retain_models names {name!r} twice: {found[name]} and {int(number)}")
    return tuple(sorted(found.items()))


@dataclass(slots=True)
class BoundSocket:
    """A listening ROUTER socket and its real address (with the port it got for port 0)."""

    socket: zmq.Socket[bytes]
    address: str
    _lock: int | None

    def close(self) -> None:
        """Stop listening; idempotent."""
        self.socket.close(linger=0)
        if self._lock is not None:
            Path(self.address.removeprefix("ipc://")).unlink(missing_ok=True)  # ZeroMQ leaves it behind at times
            free_lock(self._lock)
            self._lock = None


def bind_router(context: zmq.Context[zmq.Socket[bytes]], address: str, keys: ServerKeys | None = None) -> BoundSocket:
    """Listen on `address` (`tcp://HOST:PORT` or `ipc://PATH`), on tcp with `keys` in CURVE only.

    Raises AddressInUse or ConfigError naming the address.
    """
    scheme, _, rest = address.partition("://")
    if scheme not in ("tcp", "ipc") or not rest:
        raise ConfigError(f"cannot listen on {address!r}: write tcp://HOST:PORT or ipc://PATH")
    lock = _lock_socket(address, Path(rest)) if scheme == "ipc" else None
    router: zmq.Socket[bytes] = context.socket(zmq.ROUTER)
    try:
        _set_options(router, ipv6="[" in rest)
        guard(router, address, keys)
        router.bind(f"tcp://{_numeric(rest)}" if scheme == "tcp" else address)
    except (zmq.ZMQError, OSError) as error:
        router.close(linger=0)
        if lock is not None:
            free_lock(lock)
        raise _bind_error(address, error.errno or 0) from None
    return BoundSocket(router, router.getsockopt_string(zmq.LAST_ENDPOINT), lock)


def _set_options(router: zmq.Socket[bytes], *, ipv6: bool) -> None:
    router.setsockopt(zmq.LINGER, 0)
    router.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
    router.setsockopt(zmq.RCVHWM, RECEIVE_QUEUE)
    router.setsockopt(zmq.SNDHWM, SEND_QUEUE)
    router.setsockopt(zmq.BACKLOG, 4096)
    router.setsockopt(zmq.IPV6, int(ipv6))
    # Mandatory: a send without blocking then says that the peer is gone or does not read, instead of losing the
    # reply without a word; the machine hears of it as `Disconnected`.
    router.setsockopt(zmq.ROUTER_MANDATORY, 1)
    router.setsockopt(zmq.TCP_KEEPALIVE, 1)
    router.setsockopt(zmq.TCP_KEEPALIVE_IDLE, 10)
    router.setsockopt(zmq.TCP_KEEPALIVE_INTVL, 5)
    router.setsockopt(zmq.TCP_KEEPALIVE_CNT, 3)


def _lock_socket(address: str, path: Path) -> int | None:
    """Hold a file lock beside the socket: a second bind on a live ipc path would succeed and steal its clients."""
    if path.name.startswith(("@", "*")):
        return None
    if len(os.fsencode(path)) > zmq.IPC_PATH_MAX_LEN:
        raise _bind_error(address, errno.ENAMETOOLONG)
    if accepts(path):
        raise _bind_error(address, errno.EADDRINUSE)
    try:
        lock = take_lock(path.with_name(f"{path.name}.lock"))
    except OSError as error:
        raise _bind_error(address, error.errno or 0) from None
    if lock is None:
        raise _bind_error(address, errno.EADDRINUSE)
    return lock


def _numeric(rest: str) -> str:
    """Return HOST:PORT with a host name replaced by its address: ZeroMQ binds to numbers and interfaces only."""
    host, _, port = rest.rpartition(":")
    if port != "*" and not (port.isdecimal() and int(port) < 1 << 16):
        raise OSError(errno.EINVAL, "no port")  # ZeroMQ would take 70000 for 4464
    literal = host == "*" or host.startswith("[") or host.replace(".", "").isdigit()
    if literal or not host or host in {name for _, name in socket.if_nameindex()}:
        return rest
    found = socket.getaddrinfo(host, None, socket.AF_INET, socket.SOCK_STREAM)
    return f"{found[0][4][0]}:{port}"


def _bind_error(address: str, code: int) -> AddressInUse | ConfigError:
    if code == errno.EADDRINUSE:
        return AddressInUse(f"another process listens on {address}: choose another address, or stop it")
    reasons = {
        errno.EINVAL: "not a valid address",
        errno.ENODEV: "this machine has no such address or interface",
        errno.EADDRNOTAVAIL: "this machine has no such address",
        errno.EACCES: "permission denied",
        errno.ENOENT: "its folder does not exist",
        errno.ENAMETOOLONG: "the path is too long for a Unix socket",
        errno.EPROTONOSUPPORT: "this transport is not supported",
    }
    reason = reasons.get(code)
    if reason is None:
        reason = zmq.strerror(code) if code > 0 else "the host name cannot be resolved"
    return ConfigError(f"cannot listen on {address}: {reason}")
