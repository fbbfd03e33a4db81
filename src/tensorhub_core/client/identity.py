"""Who a worker is to the reference server, what it tells it, and who hears what the server says; no IO."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from tensorhub_core.errors import TensorHubError, error_from_wire
from tensorhub_core.ids import VersionKey
from tensorhub_core.layout.casting import Cast
from tensorhub_core.state.messages import PROTOCOL, Ended, Failure, Held, Hello, PutBlob, Register, Reply, Welcome


@dataclass(frozen=True, slots=True)
class Identity:
    """Who the worker is, for all its life; an observer belongs to no replica."""

    token: str
    model: str
    replica: str
    shard: int = 0
    num_shards: int = 1
    stream: str | None = None
    zone: str = ""
    host: str = ""
    rail: str = ""
    spot: bool = False
    observer: bool = False
    keeper: bool = False
    seeds: bool = False
    cast: Cast = False
    """Which dtypes it converts; the server needs not know which."""
    announces_sums: bool = False
    """It verifies everything, so that others may follow what it derives, and it follows others likewise."""


@dataclass(frozen=True, slots=True)
class Standing:
    """What a server that does not know the worker (any more) is told right after the hello."""

    held: Held | None = None
    blobs: tuple[PutBlob, ...] = ()
    register: Register | None = None


class Listener(Protocol):
    """Hear what the server says unasked; called on the session's thread, must not block."""

    def on_push(self, message: Reply) -> None:
        """Hear a push that concerns a round."""

    def on_reopened(self, welcome: Welcome, life: int) -> None:
        """Hear that the session said hello again, for the `life`th time: requests of earlier lives are forgotten."""

    def on_over(self, error: TensorHubError) -> None:
        """Hear that the session is over for good."""


def hello_of(
    identity: Identity,
    standing: Standing,
    high: tuple[int, int] | None,
    offloads: tuple[Held, ...] = (),
    server_epoch: int = 0,
    ended: Ended | None = None,
    created: VersionKey | None = None,
) -> Hello:
    """Return the hello of a worker that has heard of versions up to `high` and of servers up to `server_epoch`.

    `offloads` are the copies that it keeps in host memory; `ended` is how its last round ended, `created` the newest
    version that it created.
    """
    return Hello(
        protocol=PROTOCOL,
        token=identity.token,
        model=identity.model,
        replica=identity.replica,
        shard=identity.shard,
        num_shards=identity.num_shards,
        stream=identity.stream,
        zone=identity.zone,
        host=identity.host,
        rail=identity.rail,
        spot=identity.spot,
        observer=identity.observer,
        high=high,
        held=standing.held,
        ended=ended,
        offloads=offloads,
        keeper=identity.keeper,
        seeds=identity.seeds,
        server_epoch=server_epoch,
        created=created,
        announces_sums=identity.announces_sums,
        casts=bool(identity.cast),
    )


def checked(reply: Reply) -> Reply:
    """Return a reply, or raise the error that it stands for."""
    if isinstance(reply, Failure):
        raise error_from_wire(reply.code, reply.message, reply.differences)
    return reply


def same_error(error: TensorHubError) -> TensorHubError:
    """Return a fresh error of the same kind: one instance raised in several threads would mix their tracebacks."""
    return error_from_wire(error.code, str(error))
