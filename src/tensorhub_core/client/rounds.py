"""What goes into the client's round machine and what comes out of it; pure records."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Literal

from tensorhub_core.client.reading import ReadOutcome
from tensorhub_core.ids import VersionKey
from tensorhub_core.state.messages import Announce, Filling, LeaveRound, Reply, Request, Source, Welcome

Mode = Literal["replicate", "update", "stage", "install"]


class Phase(Enum):
    """Where a round stands."""

    JOINING = "waiting for the promise of a version"
    PLANNING = "planning the read"
    WITHDRAWING = "waiting for readers of the old copy"
    ENTERING = "telling the server that the memory is being filled"
    READING = "reading"
    RELOCATING = "looking for another source"
    SETTLING = "computing checksums"
    CONFIRMING = "waiting for the other shards"
    STOPPING = "stopping the read"
    LEAVING = "leaving the round"
    ENDED = "over"


@dataclass(slots=True)
class RoundState:
    """One replicate, update, stage or install of this worker.

    The memory of a stage round is the staging memory, and `have` what the registered memory holds meanwhile; `have` of
    an install is the staged version. `published`: a copy of this worker is still offered and has to be withdrawn before
    memory is touched. `touched`: the memory is not what it was. `running`: a read job runs. `complete`: every segment
    is in place and verified. `asked` counts the requests; only the answer to the newest one counts. `done_asked` is the
    number of the `Done` whose answer is not known, 0 if there is none: until then the server may take the copy for
    committed.
    """

    number: int
    want: int | None
    mode: Mode
    have: VersionKey | None
    offer: bool
    deadline_s: float | None
    published: bool
    phase: Phase = Phase.JOINING
    asked: int = 0
    key: VersionKey | None = None
    sources: tuple[Source, ...] = ()
    lost: dict[str, str] = field(default_factory=dict)
    details: dict[str, str] = field(default_factory=dict)
    """Of some lost leases: what exactly failed, where `lost` says no more than the kind."""
    prefixes: dict[str, int] = field(default_factory=dict)
    whole: set[str] = field(default_factory=set)
    known: dict[str, bytes] = field(default_factory=dict)
    """Of leases on copies without a manifest: the checksums that were heard, packed."""
    aliases: dict[str, str] = field(default_factory=dict)
    """Leases of a new promise on the very memory that the running read reads under older leases."""
    inexact: set[tuple[bytes, bytes, bytes]] = field(default_factory=set)
    """Layout, placement and manifest of sources that are read in whole segments: they do not vouch for parts."""
    withdrawing: bool = False
    clear: bool = False
    """The server has no copy of the memory that is to be filled: it need not answer before that is overwritten."""
    entered: bool = False
    touched: bool = False
    running: bool = False
    replan: bool = False
    complete: bool = False
    converted: bool = False
    """Some of what was read was converted, here or before."""
    sums: bytes | None = None
    corrupt: tuple[str, ...] = ()
    """Leases, as the last read knew them, of sources that gave wrong bytes which another one gave right."""
    done_asked: int = 0
    done_bytes: int = 0
    fruitless: int = 0
    relocations: int = 0
    discards: int = 0
    rejoins: int = 0
    ending: BaseException | None = None
    give_up_s: float | None = None
    room_bytes: int | None = None
    """Host memory that this worker may still fill with offload copies, None if the server is not told."""
    prefix: bool = True
    """Others may read what is verified before all is: every segment is compared with its checksum."""


# --- events ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Begin:
    """Start the round."""


@dataclass(frozen=True, slots=True)
class Answered:
    """The server answered request number `asked` of the round."""

    asked: int
    reply: Reply


@dataclass(frozen=True, slots=True)
class Planned:
    """The plan stands; `converted`: the memory will not be in the dtypes of the version's publisher."""

    converted: bool = False


@dataclass(frozen=True, slots=True)
class PlanFailed:
    """There is no plan; `lease` names the source whose description could not be had, if that is the reason."""

    error: BaseException
    lease: str = ""


@dataclass(frozen=True, slots=True)
class Withdrawn:
    """The old copy is withdrawn, or could not be (`error`)."""

    error: BaseException | None = None


@dataclass(frozen=True, slots=True)
class ReadEnded:
    """The read job ended; no byte of it can land any more."""

    outcome: ReadOutcome


@dataclass(frozen=True, slots=True)
class Unvouched:
    """A source gives no checksums of cuts, for its own reasons (`unable`) or because its bytes changed (`corrupt`).

    `lease` as the running read knows it.
    """

    lease: str
    kind: str
    detail: str


@dataclass(frozen=True, slots=True)
class Settled:
    """The verified bytes are where the user sees them; `sums` is the digest of their checksums."""

    sums: bytes


@dataclass(frozen=True, slots=True)
class Pushed:
    """The server said something unasked."""

    message: Reply


@dataclass(frozen=True, slots=True)
class Reopened:
    """The session said hello again; the server may know nothing of the round."""

    welcome: Welcome


@dataclass(frozen=True, slots=True)
class Broken:
    """The round cannot go on: the session is over, the caller's own code failed, or a step of ours did."""

    error: BaseException


@dataclass(frozen=True, slots=True)
class Tick:
    """Time passed."""


Event = (
    Begin
    | Answered
    | Planned
    | PlanFailed
    | Withdrawn
    | ReadEnded
    | Unvouched
    | Settled
    | Pushed
    | Reopened
    | Broken
    | Tick
)

# --- effects --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Ask:
    """Send a request; its reply comes back as `Answered(asked, reply)`."""

    asked: int
    message: Request


@dataclass(frozen=True, slots=True)
class Tell:
    """Send a request whose reply does not matter."""

    message: LeaveRound | Filling | Announce


@dataclass(frozen=True, slots=True)
class Plan:
    """Plan the read from `state.sources`, of those that are `inexact` in whole segments.

    `keep`: what was verified before counts if it would be the same bytes.
    """

    keep: bool


@dataclass(frozen=True, slots=True)
class Withdraw:
    """Unpublish the old copy; its end comes back as `Withdrawn`."""


@dataclass(frozen=True, slots=True)
class Read:
    """Start a read job of what the plan still lacks."""


@dataclass(frozen=True, slots=True)
class Advance:
    """Let the running read go on to `prefix` segments of a source, to all if `whole`."""

    lease: str
    prefix: int
    whole: bool


@dataclass(frozen=True, slots=True)
class Abandon:
    """Stop reading one source; the job ends SOURCE_FAILED of this kind."""

    lease: str
    reason: str
    kind: str = "lost"


@dataclass(frozen=True, slots=True)
class Stop:
    """Cancel the read job."""


@dataclass(frozen=True, slots=True)
class Settle:
    """Put the verified bytes where the user sees them and compute and upload their checksums."""


@dataclass(frozen=True, slots=True)
class End:
    """The round is over. `error` None: `key` is in memory (`published`: and offered), or was there already (`held`).

    `dirty`: the memory is no version. `uncertain`: the server may take the copy for committed. `unquiet`: the read
    could not be stopped, bytes may still land.
    """

    key: VersionKey | None = None
    published: bool = False
    held: bool = False
    error: BaseException | None = None
    dirty: bool = False
    uncertain: bool = False
    unquiet: bool = False


Effect = Ask | Tell | Plan | Withdraw | Read | Advance | Abandon | Stop | Settle | End
