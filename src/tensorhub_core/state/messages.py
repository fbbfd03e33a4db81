"""The protocol between workers and the reference server: requests are the machine's events, replies its effects.

Every request gets exactly one reply with its request number; some replies are deferred until the answer is known
(`Unpublish`, `JoinRound`, `Done`, `Wait`). Pushes carry request number 0. `docs/protocol.md` is generated from here.
"""

from __future__ import annotations

from typing import Literal

import msgspec

PROTOCOL = 1


class Message(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True, omit_defaults=True):
    """Base of all wire messages: a msgpack map with the class name as `type`."""


# --- requests -------------------------------------------------------------------------------------------------------


class Held(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """What a worker still holds when it says hello again after a server restart (laws L5, L6)."""

    epoch: int
    number: int
    layout: bytes
    placement: bytes
    sums: bytes
    total_bytes: int
    num_segments: int


class Hello(Message):
    """Open a session as one shard of a replica, or as an observer (which belongs to no replica).

    `token` is drawn once per worker life: a hello with the same token is the same worker saying hello again, another
    token under an occupied slot supersedes it (law L8). `high` is the highest version the worker ever heard of.
    """

    protocol: int
    token: str
    model: str
    replica: str
    shard: int = 0
    num_shards: int = 1
    stream: str | None = None
    zone: str = ""
    host: str = ""
    spot: bool = False
    observer: bool = False
    high: tuple[int, int] | None = None
    held: Held | None = None


class Heartbeat(Message):
    """Say that the worker lives; renews all its leases."""


class Leave(Message):
    """Leave for good: the worker's copies and leases end now."""


class PutBlob(Message):
    """Store a content-addressed blob (layout, placement or sums) for as long as something refers to it."""

    digest: bytes
    data: bytes


class GetBlob(Message):
    """Fetch a blob by digest."""

    digest: bytes


class Register(Message):
    """Name the worker's layout and placement; both blobs were put before."""

    layout: bytes
    placement: bytes
    total_bytes: int
    num_segments: int


class Publish(Message):
    """Commit not to change the registered memory, which holds `number`; `sums` digests its segment checksums.

    `held_epoch` names the stream epoch when the worker publishes a copy it got from a committed round; None creates
    the version in the worker's stream.
    """

    number: int
    sums: bytes
    held_epoch: int | None = None


class Unpublish(Message):
    """Take the copy back. Answered when no reader can see the memory any more; no new reader is sent to it."""


class JoinRound(Message):
    """Join round `round` of the worker's group (law L2); answered by `Promise`, `NothingNewer` or `Failure`.

    `want=None` is `latest`. `mode="update"` may be answered `NothingNewer` when `have` already is the version.
    `offer=False`: neither the copy nor its prefix is offered to anyone (memory that is processed in place).
    """

    round: int
    want: int | None = None
    mode: Literal["replicate", "update", "stage"] = "replicate"
    have: tuple[int, int] | None = None
    offer: bool = True


class Filling(Message):
    """Say that the plan stands and the worker starts to overwrite its memory (after its old copy was withdrawn)."""

    round: int


class Announce(Message):
    """Announce that the first `prefix` segments of the round's copy are verified; others may read them now."""

    round: int
    prefix: int


class LeaseFailure(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Tell how a leased source failed its reader."""

    lease: str
    kind: Literal["lost", "stalled", "corrupt", "slow", "unreachable"]


class Relocate(Message):
    """Ask for other sources of the round's version; answered by a `Promise` with the same version, or `Failure`."""

    round: int
    failures: tuple[LeaseFailure, ...]


class Done(Message):
    """Ask whether the round's leases still stood at the end of the read (law L4).

    Answered by `Committed` when every shard of the group is done (law L13), by `Discard` when the leases did not
    stand, by `Failure` when the round was aborted. `sums` digests the checksums of what the memory now holds.
    """

    round: int
    sums: bytes


class LeaveRound(Message):
    """Abort the round for all shards of the group: this shard cannot finish it (`code` is an error's wire code)."""

    round: int
    code: str
    message: str


class Wait(Message):
    """Answer `Available` as soon as a whole version newer than `newer_than` is available."""

    newer_than: tuple[int, int] | None = None


class Cancel(Message):
    """Withdraw a deferred `Wait`; it is then answered by `Failure` (deadline_exceeded)."""

    request: int


class DescribeVersion(Message):
    """List the layouts in which a whole version (None = latest) is held."""

    want: int | None = None


class ListVersions(Message):
    """List the versions of the model."""


class GetStatus(Message):
    """Describe the server, one model or all of them (None)."""

    model: str | None = None


Request = (
    Hello
    | Heartbeat
    | Leave
    | PutBlob
    | GetBlob
    | Register
    | Publish
    | Unpublish
    | JoinRound
    | Filling
    | Announce
    | Relocate
    | Done
    | LeaveRound
    | Wait
    | Cancel
    | DescribeVersion
    | ListVersions
    | GetStatus
)

# --- replies --------------------------------------------------------------------------------------------------------


class Ok(Message):
    """The request was carried out."""


class Failure(Message):
    """The request was refused or failed; `code` names the error type."""

    code: str
    message: str
    differences: tuple[str, ...] = ()


class Welcome(Message):
    """Answer a hello. `next_round` is the number of the group generation's first round this worker can join."""

    worker: str
    server_epoch: int
    generation: int
    next_round: int
    stream_epoch: int
    lease_s: float
    heartbeat_s: float


class Blob(Message):
    """Answer `GetBlob`."""

    digest: bytes
    data: bytes


class Published(Message):
    """Answer `Publish` with the version's stream epoch."""

    epoch: int
    number: int


class Source(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A leased copy to read from. `prefix` counts the segments that may be read now when it is not `whole` yet."""

    lease: str
    worker: str
    replica: str
    shard: int
    num_shards: int
    layout: bytes
    placement: bytes
    sums: bytes
    whole: bool = True
    prefix: int = 0


class Promise(Message):
    """Promise one version to the whole round, with leases on the sources of this shard.

    Either one source with the reader's own layout, or every shard of one replica of another layout.
    """

    round: int
    epoch: int
    number: int
    sources: tuple[Source, ...]


class NothingNewer(Message):
    """The group already holds the version that the round would get."""

    round: int
    epoch: int
    number: int


class Committed(Message):
    """Every shard of the round is done: the version is in the group's memory, and published if it was offered."""

    round: int
    published: bool


class Discard(Message):
    """The leases did not stand until the end: throw the bytes away and read them again from these sources."""

    round: int
    sources: tuple[Source, ...]


class Available(Message):
    """A whole version is available."""

    epoch: int
    number: int


class HeldLayout(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A layout in which a version is held by one shard of a replica."""

    replica: str
    shard: int
    num_shards: int
    layout: bytes


class VersionLayouts(Message):
    """Answer `DescribeVersion`."""

    epoch: int
    number: int
    layouts: tuple[HeldLayout, ...]


class VersionRow(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One version as `Worker.versions()` shows it."""

    epoch: int
    number: int
    whole: bool
    retained: bool
    replicas: tuple[str, ...]
    total_bytes: int


class Versions(Message):
    """Answer `ListVersions`."""

    rows: tuple[VersionRow, ...]


class ShardStatus(msgspec.Struct, frozen=True):
    """One shard as `tensorhub status` shows it."""

    shard: int
    version: int | None
    state: str
    done_bytes: int
    total_bytes: int
    source: str | None
    bytes_per_s: float


class ReplicaStatus(msgspec.Struct, frozen=True):
    """One replica as `tensorhub status` shows it."""

    replica: str
    zone: str
    host: str
    spot: bool
    version: int | None
    state: str
    shards: tuple[ShardStatus, ...]


class VersionStatus(msgspec.Struct, frozen=True):
    """One version as `tensorhub status` shows it."""

    version: int
    whole: bool
    retained: bool
    replicas: tuple[str, ...]


class ModelStatus(msgspec.Struct, frozen=True):
    """One model as `tensorhub status` shows it."""

    model: str
    stream: str | None
    epoch: int
    latest: int | None
    versions: tuple[VersionStatus, ...]
    replicas: tuple[ReplicaStatus, ...]


class StatusReply(Message):
    """Answer `GetStatus`."""

    server_epoch: int
    uptime_s: float
    models: tuple[ModelStatus, ...]


# --- pushes ---------------------------------------------------------------------------------------------------------


class RoundAborted(Message):
    """A round that this worker joined ended for all shards; its memory is dirty if it had begun to fill."""

    round: int
    code: str
    message: str


class LeaseLost(Message):
    """A leased source is gone or no longer serves: stop reading it and send `Relocate`."""

    round: int
    lease: str
    reason: str


class SourceProgress(Message):
    """A leased source that is still filling has verified more segments, or is whole now."""

    lease: str
    prefix: int
    whole: bool


class Superseded(Message):
    """Another process took this worker's place: this session is over."""

    message: str


class UnknownSession(Message):
    """The server does not know this session (it restarted, or took the worker for dead): say hello again."""

    server_epoch: int


Reply = (
    Ok
    | Failure
    | Welcome
    | Blob
    | Published
    | Promise
    | NothingNewer
    | Committed
    | Discard
    | Available
    | VersionLayouts
    | Versions
    | StatusReply
    | RoundAborted
    | LeaseLost
    | SourceProgress
    | Superseded
    | UnknownSession
)

PUSHES: tuple[type[Message], ...] = (RoundAborted, LeaseLost, SourceProgress, Superseded, UnknownSession)
