"""The reference server's whole memory, as plain records. Soft state: a restart forgets all of it."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from enum import Enum

from tensorhub_core.ids import (
    CopyId,
    Digest,
    LeaseId,
    ModelName,
    ReplicaName,
    SessionId,
    TicketId,
    VersionKey,
    WorkerId,
)
from tensorhub_core.schedule.speed import Speed
from tensorhub_core.state.constants import MachineConfig as MachineConfig
from tensorhub_core.state.kept import DrainCount, Keeping
from tensorhub_core.state.lead import Lead
from tensorhub_core.state.messages import Ended, Failure, Message, NothingNewer
from tensorhub_core.state.reachability import Reachability
from tensorhub_core.state.shelves import NO_SEAT, Flows, Index
from tensorhub_core.state.shelves import Lease as Lease
from tensorhub_core.state.shelves import Seat as Seat
from tensorhub_core.state.shelves import Ticket as Ticket


class CopyState(Enum):
    """What a copy may be used for."""

    AWAITED = "awaited"
    """Promised to its holder, which has not begun to fill it; readers may queue behind it already."""
    FILLING = "filling"
    HELD = "held"
    PUBLISHED = "published"
    DRAINING = "draining"


UNFINISHED = (CopyState.AWAITED, CopyState.FILLING)
"""States in which a copy gets its bytes from others."""
OFFERED = (CopyState.PUBLISHED, CopyState.DRAINING)
"""States in which a copy is complete, and was offered to others."""


@dataclass(slots=True)
class Registration:
    """A worker's registered memory."""

    layout: Digest
    placement: Digest
    total_bytes: int
    num_segments: int
    portable: bool


@dataclass(slots=True)
class Copy:
    """One worker's memory holding its shard of one version."""

    id: CopyId
    worker: WorkerId
    key: VersionKey
    memory: Registration
    state: CopyState
    sums: Digest
    prefix: int
    offered: bool
    depth: int = 0
    """Unfinished copies between this one and a whole one when it got its sources."""
    done_bytes: int = 0
    started_s: float = 0.0
    speed: Speed = field(default_factory=Speed)
    leases: set[LeaseId] = field(default_factory=set)
    """Leases of readers on this copy."""
    draining_since_s: float = 0.0
    origin: CopyId | None = None
    """Of an offload copy: the copy in registered memory that it was made of."""
    converted: bool = False
    """Its dtypes are not those of whoever published the version: some reader has converted them."""
    partial: bool = False
    """It has no manifest yet, and may be followed nevertheless: its checksums are announced as they are verified."""
    known: bytes = b""
    """Of such a copy: the packed checksums of its prefix."""
    content: tuple[tuple[Digest, Digest], ...] = ()
    """Layouts and manifests of the copies of another layout that it is derived from."""
    advanced_s: float = 0.0
    """When it last came on, or got its sources."""
    route: tuple[str, str] = ("", "")
    """The zones that the bytes of an unfinished copy come from and go to, by the first of its sources."""


@dataclass(slots=True)
class Worker:
    """One process life holding one shard, or an observer (which belongs to no group)."""

    id: WorkerId
    session: SessionId
    token: str
    model: ModelName
    replica: ReplicaName
    shard: int
    observer: bool
    stream: str | None
    last_seen_s: float
    creates_in: int | None = None
    """The stream epoch in which it last created a version, or had one when it said hello."""
    suspected: bool = False
    dirty: bool = False
    memory: Registration | None = None
    staging: Registration | None = None
    """The host memory in which versions may be staged; of the layout of `memory`."""
    copy: Copy | None = None
    staged: Copy | None = None
    """A second copy, in the staging memory: a source like any other, but not what the worker holds."""
    awaited: Copy | None = None
    """What the worker will fill as soon as its old copy is withdrawn; takes the place of one of the others then."""
    offloads: list[Copy] = field(default_factory=list)
    """Copies in host memory that keep retained versions (law L11); sources like any other."""
    room_bytes: int | None = None
    """What the worker said it may still fill with offload copies, as far as it is known."""
    ended: Ended | None = None
    """How its last round ended when it said hello."""
    announces_sums: bool = False
    """It announces the checksums of what it derives from other layouts, and follows copies whose holders do."""
    casts: bool = False
    """What it derives may be converted to other dtypes."""
    zone: str = ""
    told: VersionKey | None = None
    """The newest version that it was told of, or says that it has heard of: `latest` is none before it (law L10)."""
    host: str = ""
    rail: str = ""
    """The machine and, of it, the NIC group that it uses; empty is unknown. Shards of a replica may differ."""
    seat: Seat = NO_SEAT  # the same with the zone of its replica: `state/links.py`
    offload_asked: CopyId | None = None
    offload_failed: Message | None = None
    """The copy that the worker was told to offload, and why it could not."""
    leaving: bool = False
    handover_request: int | None = None
    unpublish_request: int | None = None
    unstage_request: int | None = None
    waits: set[int] = field(default_factory=set)
    """Its deferred `Wait`s, and some that were answered."""
    leases: set[LeaseId] = field(default_factory=set)
    """Leases this worker reads under."""
    tickets: set[TicketId] = field(default_factory=set)
    """What it was asked for and has not answered yet."""
    has: dict[Digest, None] = field(default_factory=dict)  # blobs that it was given lately: `state/blobs.py`

    def copies(self) -> list[Copy]:
        """Return the worker's copies: in registered, staging and offload memory, and the one it will fill."""
        return [copy for copy in (self.copy, self.staged, self.awaited, *self.offloads) if copy is not None]

    def offload_of(self, key: VersionKey) -> Copy | None:
        """Return the worker's offload copy of a version; there is at most one."""
        return next((copy for copy in self.offloads if copy.key == key), None)

    def kept_copy(self, key: VersionKey) -> Copy | None:
        """Return a finished copy of a version that is not only staged, one that takes new readers before others."""
        own = self.copy if self.copy is not None and self.copy.key == key and self.copy.state in OFFERED else None
        if not self.offloads or (own is not None and own.state is CopyState.PUBLISHED):
            return own
        other = self.offload_of(key)
        if other is None or other.state not in OFFERED:
            return own
        return other if own is None or other.state is CopyState.PUBLISHED else own

    def filling(self) -> Copy | None:
        """Return the copy that the worker's round fills; there is at most one, and no offload copy is filled."""
        if self.copy is not None and self.copy.state is CopyState.FILLING:
            return self.copy
        return self.staged if self.staged is not None and self.staged.state is CopyState.FILLING else None

    def unfinished(self) -> Copy | None:
        """Return the copy that the worker's round fills or is about to fill."""
        return self.filling() or self.awaited

    def copy_of(self, key: VersionKey, states: Collection[CopyState]) -> Copy | None:
        """Return a copy of a version in one of these states, one that takes new readers before a draining one."""
        found: Copy | None = None
        for copy in (self.copy, self.staged, self.awaited, *self.offloads):
            if copy is not None and copy.key == key and copy.state in states:
                if copy.state is not CopyState.DRAINING:
                    return copy
                found = found or copy
        return found


@dataclass(slots=True)
class Joined:
    """A shard's part in a round. `join_request`, `source_request`, `done_request`: the deferred replies still owed."""

    join_request: int | None
    offer: bool
    have: VersionKey | None
    prefix: bool = True
    """What it has verified may be offered before it is complete."""
    promised: VersionKey | None = None
    """What the server promised it before it restarted."""
    session: SessionId | None = None
    """The connection on which it joined: what was asked on an earlier one needs no answer."""
    orphaned_since_s: float | None = None
    source_request: int | None = None
    """The `Relocate`, or the `Done` that is to be read again (`rereads`), which waits for other sources."""
    rereads: bool = False
    done_request: int | None = None
    done_sums: Digest | None = None


@dataclass(slots=True)
class Round:
    """One replicate / update / stage / install by all shards of a replica (law L2).

    `key` is the promise; `verdict` how the round ended, kept until every shard has heard it. `avoid` holds, per
    shard, the copies that failed it and how, `tried` whose they were, `details` what exactly failed; `told_slow` those
    it was told to leave because they are slow, `told_late` because their holders had not begun.
    """

    number: int
    want: int | None
    mode: str
    joined: dict[int, Joined] = field(default_factory=dict)
    key: VersionKey | None = None
    leases: dict[int, list[LeaseId]] = field(default_factory=dict)
    avoid: dict[int, dict[CopyId, str]] = field(default_factory=dict)
    told_slow: dict[int, set[CopyId]] = field(default_factory=dict)
    told_late: dict[int, set[CopyId]] = field(default_factory=dict)
    tried: dict[CopyId, ReplicaName] = field(default_factory=dict)
    stalls: dict[tuple[int, CopyId], list[float]] = field(default_factory=dict)
    """When a shard reported that a copy gave nothing."""
    details: dict[tuple[int, CopyId], str] = field(default_factory=dict)
    verdict: Message | None = None
    unheard: set[int] = field(default_factory=set)
    join_by_s: float | None = None
    held_since_s: float | None = None
    """Since when it waits for a source that can be reached (`reaching.py`)."""
    awaits_silent: bool = False
    """Some shard has no source but the copies of workers that are silent at the moment (law L4)."""
    resumed: bool = False
    """Opened by a shard that was in it in an earlier life of the server: others may have ended it there (law L6)."""

    @property
    def kind(self) -> str:
        """Return what all shards of a round have to agree on: `stage`, `install`, or `fill` for the others."""
        return self.mode if self.mode in ("stage", "install") else "fill"


@dataclass(slots=True)
class Group:
    """A replica: its workers by shard and its rounds."""

    model: ModelName
    replica: ReplicaName
    generation: int
    num_shards: int
    zone: str
    host: str
    spot: bool
    keeper: bool = False
    """It exists to keep versions (`tensorhub seed --keep`)."""
    seeds: bool = False
    """It exists to bring versions into its zone (`tensorhub seed --zone`)."""
    members: dict[int, WorkerId] = field(default_factory=dict)
    """By shard, and in the order of the shards."""
    rounds: dict[int, Round] = field(default_factory=dict)
    next_round: int = 0
    first_round: int | None = None
    """The lowest number of a round that was opened in this life of the server."""
    ended: dict[int, Failure | NothingNewer] = field(default_factory=dict)
    """How the newest rounds ended, for shards that have lost the answer."""
    retired: list[str] = field(default_factory=list)
    place: int = 0  # replicas of lower numbers came before this one

    def open_rounds(self) -> list[Round]:
        """Return the rounds without a verdict: one, after a restart also later ones that wait for it; oldest first."""
        return sorted((r for r in self.rounds.values() if r.verdict is None), key=lambda r: r.number)

    def open_round(self) -> Round | None:
        """Return the round whose turn it is: the oldest one without a verdict."""
        found: Round | None = None
        for current in self.rounds.values():
            if current.verdict is None and (found is None or current.number < found.number):
                found = current
        return found


@dataclass(slots=True)
class VersionRecord:
    """What is known of a version; `manifests` binds a layout (which names its shard) to its first sums (law L12)."""

    key: VersionKey
    creator: ReplicaName
    was_whole: bool = False
    total_bytes: int = 0
    manifests: dict[Digest, Digest] = field(default_factory=dict)
    keeping: Keeping = field(default_factory=Keeping)


@dataclass(slots=True)
class Waiting:
    """A deferred `Wait`; who asked may be gone by now."""

    worker: WorkerId
    request: int
    newer_than: VersionKey | None


@dataclass(slots=True)
class ModelState:
    """One stream of versions. `high` is the highest version that ever was whole, `heard` the highest heard of.
    `created` is the highest that somebody who came back from an earlier life of the server had created there.
    """

    name: ModelName
    epoch: int = 1
    stream: str | None = None
    streams: list[str] = field(default_factory=list)
    high: VersionKey | None = None
    heard: VersionKey | None = None
    created: VersionKey | None = None
    versions: dict[VersionKey, VersionRecord] = field(default_factory=dict)
    groups: dict[ReplicaName, Group] = field(default_factory=dict)
    calling: set[ReplicaName] = field(default_factory=set)  # whose rounds may wait for others: `state/calling.py`
    waiting: list[Waiting] = field(default_factory=list)
    holders: dict[VersionKey, dict[ReplicaName, None]] = field(default_factory=dict)
    """Replicas of which some shard has a copy of the version, in any state; in the order in which they came."""
    finished: dict[VersionKey, dict[ReplicaName, None]] = field(default_factory=dict)
    """Those of which some shard has all of its copy: few, or none, while thousands read it."""
    index: Index = field(default_factory=Index)
    leads: dict[str, Lead] = field(default_factory=dict)
    """Zones in which a seed agent has been."""
    retain: int = 0
    handovers: set[WorkerId] = field(default_factory=set)
    """Workers that are about to leave and wait until nothing depends on them."""
    stuck: set[WorkerId] = field(default_factory=set)
    """Workers that cannot make the offload copy they should, and wait for another replica."""
    drains: DrainCount = field(default_factory=DrainCount)
    offloads_made: int = 0
    offloads_dropped: int = 0


@dataclass(slots=True)
class BlobEntry:
    """A content-addressed blob and when it was last put or fetched."""

    data: bytes
    touched_s: float


@dataclass(slots=True)
class ServerState:
    """Everything the reference server knows."""

    config: MachineConfig
    started_s: float
    now_s: float
    listen_from_s: float = 0.0
    """When this life began, or when somebody came back after all had been silent for so long that they were buried."""
    buried_s: float = 0.0
    buried: int = 0
    """When a worker was buried for its silence last, and how many were within a lease of each other."""
    deserted: bool = False
    """All workers, and more than one, fell silent together: it was this server that was cut off."""
    listening: bool = False
    """Somebody came back from an earlier server life: no promise and no withdrawal before the grace is over (L5)."""
    counter: int = 0
    models: dict[ModelName, ModelState] = field(default_factory=dict)
    workers: dict[WorkerId, Worker] = field(default_factory=dict)
    sessions: dict[SessionId, WorkerId] = field(default_factory=dict)
    copies: dict[CopyId, Copy] = field(default_factory=dict)
    leases: dict[LeaseId, Lease] = field(default_factory=dict)
    tickets: dict[TicketId, Ticket] = field(default_factory=dict)
    blobs: dict[Digest, BlobEntry] = field(default_factory=dict)
    flows: Flows = field(default_factory=Flows)
    reachability: Reachability = field(default_factory=Reachability)
    draining: set[CopyId] = field(default_factory=set)
    offloads: set[CopyId] = field(default_factory=set)
    blob_bytes: int = 0
    known_bytes: int = 0
    """Announced checksums of copies without a manifest."""
    ticked_s: float = 0.0
    swept_s: float = 0.0

    @classmethod
    def new(cls, config: MachineConfig, now: float) -> ServerState:
        """Return the state of a server that has just started."""
        return cls(config=config, started_s=now, listen_from_s=now, now_s=now, ticked_s=now, swept_s=now)

    def next_deadline(self, now: float) -> float | None:
        """Return when the next `Tick` is due at the latest; None when there is nothing to watch."""
        if not self.workers and not self.blobs:
            return None
        return max(now, self.ticked_s + min(self.config.heartbeat_s, self.config.lease_s / 4))

    def in_grace(self, now: float) -> bool:
        """Tell whether the server still only listens (law L5)."""
        return self.listening and now < self.listen_from_s + self.config.grace_s
