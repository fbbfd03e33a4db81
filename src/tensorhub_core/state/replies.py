"""What the reference server answers and pushes: the machine's effects. Pushes carry request number 0."""

from __future__ import annotations

import msgspec

from tensorhub_core.state.requests import Message, Refusal


class Ok(Message, frozen=True):
    """The request was carried out."""


class Failure(Message, frozen=True):
    """The request was refused or failed; `code` names the error type."""

    code: str
    message: str
    differences: tuple[str, ...] = ()


class Welcome(Message, frozen=True):
    """Answer a hello. `next_round` is the number of the group generation's first round this worker can join."""

    worker: str
    server_epoch: int
    generation: int
    next_round: int
    stream_epoch: int
    lease_s: float
    heartbeat_s: float


class Blob(Message, frozen=True):
    """Answer `GetBlob`."""

    digest: bytes
    data: bytes


class Published(Message, frozen=True):
    """Answer `Publish` with the version's stream epoch."""

    epoch: int
    number: int


class OffloadKept(Message, frozen=True):
    """Answer `Offloaded` with the id of the new copy, which may be read now."""

    copy: str


class Source(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A leased copy to read from. `prefix` counts the segments that may be read now when it is not `whole` yet.

    `converted`: not in the publisher's dtypes. `partial`: there is no manifest yet, so `sums` is empty; `known` packs
    the checksums of the first segments, and more come with `SourceProgress`.
    """

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
    converted: bool = False
    partial: bool = False
    known: bytes = b""


class Promise(Message, frozen=True):
    """Promise one version to the whole round, with leases on the sources of this shard.

    Either one or several sources with the reader's own layout and the same checksums, each of which has everything, or
    every shard of one replica of another layout. `blobs`: small ones that these sources name and the worker may lack.
    """

    round: int
    epoch: int
    number: int
    sources: tuple[Source, ...]
    blobs: tuple[bytes, ...] = ()


class NothingNewer(Message, frozen=True):
    """The group already holds the version that the round would get."""

    round: int
    epoch: int
    number: int


class Committed(Message, frozen=True):
    """Every shard of the round is done: the version is in the group's memory, and published if it was offered."""

    round: int
    published: bool


class Discard(Message, frozen=True):
    """The leases did not stand until the end: throw the bytes away and read them again from these sources."""

    round: int
    sources: tuple[Source, ...]
    blobs: tuple[bytes, ...] = ()


class SumsGiven(Message, frozen=True):
    """Answer `AskSums` with what the source gave: one little-endian u64 for each cut, or why there are none."""

    sums: bytes = b""
    refusal: Refusal = ""
    detail: str = ""


class Available(Message, frozen=True):
    """A whole version is available."""

    epoch: int
    number: int


class HeldLayout(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A layout in which a version is held by one shard of a replica; `converted`: not in the publisher's dtypes."""

    replica: str
    shard: int
    num_shards: int
    layout: bytes
    converted: bool = False


class VersionLayouts(Message, frozen=True):
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


class Versions(Message, frozen=True):
    """Answer `ListVersions`."""

    rows: tuple[VersionRow, ...]


class PlaceStatus(msgspec.Struct, frozen=True):
    """Where a shard runs; empty is unknown."""

    zone: str = ""
    host: str = ""
    rail: str = ""


class SourceStatus(msgspec.Struct, frozen=True):
    """One shard of which another one reads; `wan`: it is in another zone."""

    replica: str
    shard: int
    place: PlaceStatus = PlaceStatus()
    wan: bool = False


class FillStatus(msgspec.Struct, frozen=True):
    """What a shard is promised and has not got wholly yet, in registered or (`staged`) in staging memory.

    `begun`: it has begun to fill; `late`: it has not come on for so long that others do not wait for it any more.
    """

    version: int
    begun: bool
    done_bytes: int
    total_bytes: int
    bytes_per_s: float = 0.0
    staged: bool = False
    late: bool = False


class ShardStatus(msgspec.Struct, frozen=True):
    """One shard as `tensorhub status` shows it."""

    shard: int
    version: int | None
    state: str
    done_bytes: int
    total_bytes: int
    source: str | None
    bytes_per_s: float
    place: PlaceStatus = PlaceStatus()
    sources: tuple[SourceStatus, ...] = ()
    fills: FillStatus | None = None


class ReplicaStatus(msgspec.Struct, frozen=True):
    """One replica as `tensorhub status` shows it."""

    replica: str
    zone: str
    host: str
    spot: bool
    version: int | None
    state: str
    shards: tuple[ShardStatus, ...]
    seeds: bool = False
    waits_for: str | None = None
    """What its round has not got yet: `latest`, or the number of a version."""


class VersionStatus(msgspec.Struct, frozen=True):
    """One version as `tensorhub status` shows it."""

    version: int
    whole: bool
    retained: bool
    replicas: tuple[str, ...]


class DrainStatus(msgspec.Struct, frozen=True):
    """How often copies of a model were withdrawn since the server's start, and how long that took."""

    count: int = 0
    total_s: float = 0.0
    max_s: float = 0.0


class OffloadStatus(msgspec.Struct, frozen=True):
    """How many offload copies a model's workers made and dropped since the server's start, and their bytes now."""

    made: int = 0
    dropped: int = 0
    bytes: int = 0


class ModelStatus(msgspec.Struct, frozen=True):
    """One model as `tensorhub status` shows it."""

    model: str
    stream: str | None
    epoch: int
    latest: int | None
    versions: tuple[VersionStatus, ...]
    replicas: tuple[ReplicaStatus, ...]
    drain: DrainStatus = DrainStatus()
    offload: OffloadStatus = OffloadStatus()


class StatusReply(Message, frozen=True):
    """Answer `GetStatus`."""

    server_epoch: int
    uptime_s: float
    models: tuple[ModelStatus, ...]


class RoundAborted(Message, frozen=True):
    """A round that this worker joined ended for all shards; its memory is dirty if it had begun to fill."""

    round: int
    code: str
    message: str


class LeaseLost(Message, frozen=True):
    """A leased source is gone or no longer serves: stop reading it and send `Relocate`."""

    round: int
    lease: str
    reason: str


class SourceSlow(Message, frozen=True):
    """A leased source is far slower than what others read from: leave it with `Relocate` (kind `slow`).

    The lease stands until then, so what is read meanwhile counts.
    """

    round: int
    lease: str
    reason: str


class SourceProgress(Message, frozen=True):
    """A leased source that is still filling has verified more segments, or is whole now.

    Of one that was promised as `partial`, `sums` packs the checksums of the segments from `first` on.
    """

    lease: str
    prefix: int
    whole: bool
    first: int = 0
    sums: bytes = b""


class SumsWanted(Message, frozen=True):
    """Compute the checksums of parts of what lies at `placement`, and give them with `GiveSums`.

    The segments they are parts of are first compared with the manifest `sums` that the worker published: a holder does
    not vouch for bytes that are not the version's. `cuts` as in `AskSums`, made by another worker.
    """

    ticket: str
    placement: bytes
    sums: bytes
    cuts: bytes


class Offload(Message, frozen=True):
    """Copy what this copy of yours holds into host memory, and say `Offloaded`: it is the last of a retained version.

    Its readers go on. Say `OffloadFailed` if it cannot be made. It may be asked for again while it is being made.
    """

    copy: str
    epoch: int
    number: int


class DropOffload(Message, frozen=True):
    """Free an offload copy: the server has withdrawn it, and nobody reads it any more.

    With the id of an original that is still being copied: give it up, the copy is not needed any more. `placement` is
    the digest of a finished one's, by which its holder knows it also after a restart of the server, when ids are new.
    """

    copy: str
    placement: bytes = b""


class Superseded(Message, frozen=True):
    """Another process took this worker's place: this session is over."""

    message: str


class UnknownSession(Message, frozen=True):
    """The server does not know this session (it restarted, or took the worker for dead): say hello again."""

    server_epoch: int


Reply = (
    Ok
    | Failure
    | Welcome
    | Blob
    | Published
    | OffloadKept
    | Promise
    | NothingNewer
    | Committed
    | Discard
    | SumsGiven
    | Available
    | VersionLayouts
    | Versions
    | StatusReply
    | RoundAborted
    | LeaseLost
    | SourceProgress
    | SourceSlow
    | SumsWanted
    | Offload
    | DropOffload
    | Superseded
    | UnknownSession
)

PUSHES: tuple[type[Message], ...] = (
    *(RoundAborted, LeaseLost, SourceProgress, SourceSlow, SumsWanted),
    *(Offload, DropOffload, Superseded, UnknownSession),
)
