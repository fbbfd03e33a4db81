"""What workers ask of the reference server: the machine's events."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from tensorhub_core.state.bounds import BlobDigest, Count, CutChecksums, Cuts, Detail, Id, Ids, Size, Text

PROTOCOL = 1


class Message(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True, omit_defaults=True):
    """Base of all wire messages: a msgpack map with the class name as `type`."""


class Held(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """What a worker still holds when it says hello again after a server restart (laws L5, L6).

    `converted`: not in the publisher's dtypes.
    """

    epoch: Count
    number: Count
    layout: BlobDigest
    placement: BlobDigest
    sums: BlobDigest
    total_bytes: Size
    num_segments: Count
    portable: bool = True
    converted: bool = False


class Ended(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """How the worker's last round ended: with version `key` (in staging memory, if it was staged), or broken off."""

    round: Count
    key: tuple[Count, Count] | None = None


class Hello(Message, frozen=True):
    """Open a session as one shard of a replica, or as an observer (which belongs to no replica).

    `token` is drawn once per worker life: a hello with the same token is the same worker saying hello again, another
    token under an occupied slot supersedes it (law L8). `high` is the highest version the worker ever heard of.
    `created` is the newest version that it created in its stream, whether or not it still holds it (law L10).
    `ended`: how the last round that the worker was in ended, for those who have not heard it (law L6).
    `server_epoch` is the highest epoch of a server it ever heard of: a server of a lower one stops without an answer.
    `offloads` are the offload copies it holds in host memory; `keeper` says that its replica exists to keep versions
    (law L11). `announces_sums`: it announces the checksums of what it derives from other layouts, and follows copies
    whose holders do. `casts`: what it derives may be converted. `zone`, `host` and `rail` say where this shard runs:
    datacentre, machine and NIC group; empty is unknown. Shards of one replica may be on different machines. `seeds`:
    the replica is a seed agent of its zone, where `latest` means what it has brought, or somebody else.
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
    high: tuple[Count, Count] | None = None
    held: Held | None = None
    ended: Ended | None = None
    offloads: Annotated[tuple[Held, ...], msgspec.Meta(max_length=1024)] = ()
    keeper: bool = False
    server_epoch: Count = 0
    created: tuple[Count, Count] | None = None
    announces_sums: bool = False
    casts: bool = False
    rail: str = ""
    seeds: bool = False


class Heartbeat(Message, frozen=True):
    """Say that the worker lives; renews all its leases."""


class Leave(Message, frozen=True):
    """Leave for good: the worker's copies and leases end now."""


class PutBlob(Message, frozen=True):
    """Store a content-addressed blob (layout, placement or sums) for as long as something refers to it."""

    digest: BlobDigest
    data: bytes


class GetBlob(Message, frozen=True):
    """Fetch a blob by digest."""

    digest: BlobDigest


class Register(Message, frozen=True):
    """Name the worker's layout and placement; both blobs were put before.

    `portable`: readers of another layout may read it through boxes (a tagged layout is not portable).
    """

    layout: BlobDigest
    placement: BlobDigest
    total_bytes: Size
    num_segments: Count
    portable: bool = True


class RegisterStaging(Message, frozen=True):
    """Name the host memory in which the worker stages versions; its layout is that of the registered memory."""

    placement: BlobDigest


class Publish(Message, frozen=True):
    """Commit not to change the registered memory, which holds `number`; `sums` digests its segment checksums.

    `held_epoch` names the stream epoch when the worker publishes a copy it got from a committed round; None creates
    the version in the worker's stream. `room_bytes` is the host memory that the worker may still fill with offload
    copies, None if it is not told; a publish that could not be offloaded later is refused (law L11). `converted` as for
    `Done`.
    """

    number: Count
    sums: BlobDigest
    held_epoch: Count | None = None
    room_bytes: Count | None = None
    converted: bool = False


class Unpublish(Message, frozen=True):
    """Take the copy back. Answered when no reader can see the memory any more; no new reader is sent to it."""


class Offloaded(Message, frozen=True):
    """Say that the offload copy is made that `Offload` asked for; answered by `OffloadKept`, and it serves at once.

    `copy` names the original, of which layout, checksums and segments are the same. `placement` is a blob put before.
    `Failure`: it is not needed any more, its memory can be freed.
    """

    copy: Id
    placement: BlobDigest


class OffloadFailed(Message, frozen=True):
    """Say that the offload copy could not be made; the `Unpublish` that waits for it is refused with this error.

    Unless another replica is about to hold this version or a newer one: then it goes on waiting.
    """

    copy: Id
    code: Id
    message: Text


class HandOver(Message, frozen=True):
    """Say that the worker is about to leave; answered when no retained version depends on its replica (law L11).

    `Failure` (version_unavailable) at once, naming the version, if no reliable replica is there to take it over. From
    now on the worker counts as no holder that versions can rely on, and is asked for no offload copy.
    """


class Unstage(Message, frozen=True):
    """Take the staged copy back. Answered when no reader can see the staging memory any more.

    A round that still fills it is aborted for all shards of the group.
    """


class JoinRound(Message, frozen=True):
    """Join round `round` of the worker's group (law L2); answered by `Promise`, `NothingNewer` or `Failure`.

    `want=None` is `latest`. `mode="update"` may be answered `NothingNewer` when `have` already is the version.
    `mode="stage"` fills the staging memory instead, while the worker's copy stays as it is, and may be answered alike.
    `mode="install"` is answered when every shard has joined it with the same version in `have`, which all of them have
    staged; it then is a round like any other, without sources.
    `offer=False`: neither the copy nor its prefix is offered to anyone (memory that is processed in place).
    `prefix=False`: only the finished copy is offered, because the worker does not verify every segment (law L12).
    `promised` is the version that an earlier life of the server, or of the connection, promised this call.
    `again`: the worker joined this very round before, over a connection that was lost or at a server that has restarted
    since; a round that has ended meanwhile answers with its end (`NothingNewer` if it was committed).
    `room_bytes` is the host memory that the worker may still fill with offload copies, None if it is not told.
    """

    round: Count
    want: Count | None = None
    mode: Literal["replicate", "update", "stage", "install"] = "replicate"
    have: tuple[Count, Count] | None = None
    offer: bool = True
    prefix: bool = True
    promised: tuple[Count, Count] | None = None
    room_bytes: Count | None = None
    again: bool = False


class Filling(Message, frozen=True):
    """Say that the plan stands and the worker starts to overwrite its memory (after its old copy was withdrawn).

    In a round of mode `stage` that is the staging memory. `converted` as for `Done`.
    """

    round: Count
    converted: bool = False


class Announce(Message, frozen=True):
    """Announce that the first `prefix` segments of the round's copy are verified; others may read them now.

    Readers of another layout have no manifest of their own yet: they announce the checksums too. `sums` packs those of
    the last segments of the prefix, one little-endian u64 each; what came before is said already, or comes again. One
    whose copy nobody may follow announces `prefix=0` and only `done_bytes`, which `tensorhub status` shows.
    """

    round: Count
    prefix: Count
    done_bytes: Count = 0
    sums: CutChecksums = b""


class LeaseFailure(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Tell how a leased source failed its reader; `detail` says in words what the kind does not."""

    lease: Id
    kind: Literal["lost", "stalled", "corrupt", "slow", "unreachable"]
    detail: Detail = ""


Refusal = Literal["", "wait", "unable", "corrupt"]
"""Why there are no checksums of cuts: none yet, ask again; never from this source; its bytes are not the version's."""


class AskSums(Message, frozen=True):
    """Ask the source of a lease for the checksums of parts of its segments, so that no more than these is read.

    `cuts` packs them: little-endian u64 [cuts, 5] of (segment, offset_bytes, run_bytes, stride_bytes, count). Answered
    by `SumsGiven` when the source has answered, by `Failure` if the lease is over.
    """

    round: Count
    lease: Id
    cuts: Cuts


class GiveSums(Message, frozen=True):
    """Answer `SumsWanted`: `sums` packs one little-endian u64 for each cut, none with a `refusal`.

    Only the worker that was asked can answer, once; anything else is dropped without a word.
    """

    ticket: Id
    sums: CutChecksums = b""
    refusal: Refusal = ""
    detail: Detail = ""


class Relocate(Message, frozen=True):
    """Ask for other sources of the round's version; answered by a `Promise` with the same version, or `Failure`."""

    round: Count
    failures: Annotated[tuple[LeaseFailure, ...], msgspec.Meta(max_length=4096)]


class Done(Message, frozen=True):
    """Ask whether the round's leases still stood at the end of the read (law L4).

    Answered by `Committed` when every shard of the group is done (law L13), by `Discard` when the leases did not
    stand, by `Failure` when the round was aborted. `sums` digests the checksums of what the memory now holds. `corrupt`
    names the leases of sources that gave wrong bytes which another source gave right; the server's log names them.
    `converted`: the reader, or its source before it, has converted dtypes; such a copy is read last.
    """

    round: Count
    sums: BlobDigest
    corrupt: Ids = ()
    converted: bool = False


class LeaveRound(Message, frozen=True):
    """Abort the round for all shards of the group: this shard cannot finish it (`code` is an error's wire code)."""

    round: Count
    code: Id
    message: Text


class Wait(Message, frozen=True):
    """Answer `Available` as soon as a whole version newer than `newer_than` is available.

    Or as soon as other shards of this replica are in a round with such a promise, whoever is offered it by then.
    """

    newer_than: tuple[Count, Count] | None = None


class Cancel(Message, frozen=True):
    """Withdraw a deferred `Wait`; it is then answered by `Failure` (deadline_exceeded)."""

    request: Count


class DescribeVersion(Message, frozen=True):
    """List the layouts in which a whole version (None = latest) is held."""

    want: Count | None = None


class ListVersions(Message, frozen=True):
    """List the versions of the model."""


class GetStatus(Message, frozen=True):
    """Describe the server, one model or all of them (None)."""

    model: str | None = None


Request = (
    Hello
    | Heartbeat
    | Leave
    | PutBlob
    | GetBlob
    | Register
    | RegisterStaging
    | Publish
    | Unpublish
    | Offloaded
    | OffloadFailed
    | HandOver
    | Unstage
    | JoinRound
    | Filling
    | Announce
    | AskSums
    | GiveSums
    | Relocate
    | Done
    | LeaveRound
    | Wait
    | Cancel
    | DescribeVersion
    | ListVersions
    | GetStatus
)
