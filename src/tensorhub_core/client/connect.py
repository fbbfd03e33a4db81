"""Connect a worker to its reference server."""

from __future__ import annotations

import os
import secrets
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from operator import index
from typing import TypeVar

from tensorhub_core.client.device import TorchMemory
from tensorhub_core.client.executor import ReadExecutor
from tensorhub_core.client.host_memory import available_bytes
from tensorhub_core.client.identity import Identity
from tensorhub_core.client.mailbox import Mailbox
from tensorhub_core.client.offload import OffloadPolicy
from tensorhub_core.client.place import read_facts, settle
from tensorhub_core.client.resources import Resources
from tensorhub_core.client.session import Session
from tensorhub_core.client.worker import Worker
from tensorhub_core.config import ClientConfig
from tensorhub_core.errors import ConfigError, ServerUnreachable
from tensorhub_core.layout.casting import check_cast
from tensorhub_core.observe.counters import WorkerCounters
from tensorhub_core.observe.log import get_logger
from tensorhub_core.server.embedded import embedded_address
from tensorhub_core.settings import Settings, load_settings
from tensorhub_core.state.messages import Welcome
from tensorhub_core.transport.base import Transport
from tensorhub_core.transport.interface import check_interface, read_cards
from tensorhub_core.transport.registry import TRANSPORTS
from tensorhub_core.transport.select import choose_transport
from tensorhub_core.wire.curve import client_keys

W = TypeVar("W", bound=Worker)
_EMBEDDED_TRY_S = 2.0
"""How long an embedded server's address is believed: a hub that has just ended leaves one behind for a moment."""


def connect(
    server: str | Sequence[str] | None = None,
    *,
    model: str,
    replica: str | None = None,
    shard: int = 0,
    num_shards: int = 1,
    stream: str | None = None,
    zone: str | None = None,
    host: str | None = None,
    rail: str | None = None,
    spot: bool = False,
    keeper: bool = False,
    seeds: bool = False,
    cast: bool | str = False,
    transport: str | Transport = "auto",
    settings: Mapping[str, object] | Settings | None = None,
) -> Worker:
    """Connect as one shard of a replica of `model`, and return the worker; a context manager.

    `server` is an address, or several, in a list or with commas between: the server and its standbys. None means
    `TENSORHUB_SERVER`, else the embedded server of this user on this machine. `replica` is unique
    by default. `stream` names the life of the version numbers, such as a training run's id. `zone`, `host` and `rail`
    say where this worker runs: datacentre, machine, NIC group; None means settings, else what is detected (see
    docs/operations.md, Places). `spot`: this worker may vanish at any time; `keeper`: it is there to keep versions for
    others, as `tensorhub seed --keep`; `seeds`: it is there to bring versions into its zone, as `tensorhub seed
    --zone`. `cast`: what the worker registers may be filled from a version in another floating dtype, rounded to
    nearest; the name of a dtype ("bf16", "fp16", "fp32" or torch's): only what is registered in that one. `transport`
    names the data plane: `auto` takes the best for each peer, `nixl`, `tcp` and `cma` (memory of processes on this
    machine) only what they say; or it is one. Raises ServerUnreachable naming the address after `connect_timeout_s`,
    ProtocolMismatch, ConfigError (also for a network interface that cannot be used, naming those that can),
    TransportError if threads or files run out. Any thread.
    """
    filled = load_settings(settings)
    config = filled.client
    shard, num_shards = _checked_shard(shard, num_shards)
    names = {"model": model, "replica": replica, "stream": stream, "zone": zone, "host": host, "rail": rail}
    for what, text in names.items():
        _check_text(what, text)
    if isinstance(transport, str) and transport not in ("auto", "memory", *TRANSPORTS):
        raise ConfigError(f"transport must be auto, {', '.join(TRANSPORTS)} or a Transport, not {transport!r}")
    where = settle(filled, os.environ, read_facts(), zone=zone, host=host, rail=rail)
    identity = Identity(
        token=secrets.token_hex(16),
        model=model,
        replica=replica or f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(4)}",
        shard=shard,
        num_shards=num_shards,
        stream=stream,
        zone=where.zone.value,
        host=where.host.value,
        rail=where.rail.value,
        spot=spot,
        keeper=keeper,
        seeds=seeds,
        cast=check_cast(cast),
        announces_sums=config.verify == "always",
    )
    return open_worker(Worker, server, identity, transport, filled)


def open_worker(
    kind: type[W],
    server: str | Sequence[str] | None,
    identity: Identity,
    transport: str | Transport,
    settings: Settings,
) -> W:
    """Open a session and return a worker of this kind; errors as of `connect()`."""
    config, mailbox = settings.client, Mailbox(WorkerCounters())
    if config.interface is not None and isinstance(transport, str):
        check_interface(config.interface, config.transport if transport == "auto" else transport, read_cards())
    session, welcome = open_session(server, identity, mailbox, settings)
    mailbox.welcomed(welcome)
    resources = Resources(
        session,
        _transport_maker(transport, config),
        lambda t: ReadExecutor(t, config, devices=TorchMemory()),
        _offload_policy(config),
    )
    return kind(identity, config, resources, mailbox)


def open_session(
    server: str | Sequence[str] | None, identity: Identity, mailbox: Mailbox, settings: Settings
) -> tuple[Session, Welcome]:
    """Open a session with `server`, with the configured one, or with the embedded one; errors as of `connect()`."""
    address = server or settings.client.server
    if address is None:
        return _connect_embedded(identity, mailbox, settings)
    session = Session(address, identity, mailbox, keys=client_keys(settings.client))
    return session, _opened(session, settings.client.connect_timeout_s)


def _checked_shard(shard: int, num_shards: int) -> tuple[int, int]:
    try:
        number, count = index(shard), index(num_shards)
    except TypeError:
        raise ConfigError(f"shard and num_shards must be whole numbers, not {shard!r} and {num_shards!r}") from None
    if count < 1 or not 0 <= number < count:
        raise ConfigError(f"shard must be from 0 to num_shards - 1, not {shard} of {num_shards}")
    return number, count


def _check_text(what: str, text: str | None) -> None:
    try:
        if text is not None:
            text.encode()
    except (AttributeError, UnicodeEncodeError):
        raise ConfigError(f"{what} must be valid unicode text, not {text!r}") from None


def _opened(session: Session, timeout_s: float) -> Welcome:
    try:
        return session.open(timeout_s)
    except BaseException:
        session.close()
        raise


def _connect_embedded(identity: Identity, mailbox: Mailbox, settings: Settings) -> tuple[Session, Welcome]:
    def resolve(timeout_s: float) -> str:
        return embedded_address(timeout_s, settings.server)

    end = time.monotonic() + settings.client.connect_timeout_s
    while True:
        session = Session(resolve(max(0.0, end - time.monotonic())), identity, mailbox, resolve=resolve)
        left_s = end - time.monotonic()
        try:
            return session, _opened(session, min(_EMBEDDED_TRY_S, max(0.1, left_s)))
        except ServerUnreachable:
            if time.monotonic() >= end:
                raise


def _offload_policy(config: ClientConfig) -> OffloadPolicy:
    limit_bytes, available = config.offload_limit_bytes, available_bytes()
    if limit_bytes is None and available is not None:
        limit_bytes = available // (2 * processes_here(os.environ))
    return OffloadPolicy(limit_bytes, check=config.verify != "off", patience_s=config.handover_s)


def processes_here(environ: Mapping[str, str]) -> int:
    """Return how many processes a launcher such as torchrun started on this machine: they share its memory."""
    text = environ.get("LOCAL_WORLD_SIZE", "")
    return max(1, int(text)) if text.isascii() and text.isdecimal() and len(text) < 10 else 1


def _transport_maker(transport: str | Transport, config: ClientConfig) -> Callable[[], Transport]:
    given = iter(() if isinstance(transport, str) else (transport,))

    def make() -> Transport:
        if not isinstance(transport, str):
            for once in given:
                return once
            raise ConfigError(
                "a copy in host memory needs a data plane of its own: give connect() a transport's name, not an object"
            )
        name = config.transport if transport == "auto" else transport
        choice = choose_transport(name, interface=config.interface)
        get_logger("client").info("data plane %s", choice.reason)
        return choice.transport

    return make
