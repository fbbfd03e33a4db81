"""Name the steps of an engine's swap and what they are answered with; drive a transaction with an engine's adapter."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Generator
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from tensorhub_core.engine.config import PauseMode

State = Literal["serving", "swapping", "paused", "failed"]
SwapMode = PauseMode | Literal["in_place"]
"""`in_place`: running requests keep what they have computed, which an engine may refuse."""
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ShardReport:
    """What one rank says after a step: a reply, never an exception.

    `version`, `epoch`: what its registered memory holds whole, None while it is dirty. `served`: the version its engine
    computes with, None from the moment its memory changes until it is processed. `digest` is of the verified checksums
    of the memory's bytes. `code` is an error's wire code.
    """

    shard: int
    ok: bool = True
    version: int | None = None
    epoch: int = 0
    served: int | None = None
    published: bool = False
    source: str | None = None
    digest: str = ""
    total_bytes: int = 0
    code: str = ""
    message: str = ""
    note: str = ""
    staged: tuple[int, int] | None = None
    """The (epoch, number) that waits in host memory to be installed."""


@dataclass(frozen=True, slots=True)
class Look:
    """Ask the hub whether the version can be had now, before anything is stopped.

    Answered by the (epoch, number) that would be got; raises VersionUnavailable.
    """

    version: int | Literal["latest"]


@dataclass(frozen=True, slots=True)
class Pause:
    """Stop generation: let running requests finish (`wait`), freeze them (`keep`, `in_place`) or abort them."""

    mode: SwapMode


@dataclass(frozen=True, slots=True)
class Update:
    """Fill every rank's memory in one round, and commit for all; answered by one ShardReport a rank."""

    version: int | Literal["latest"]


@dataclass(frozen=True, slots=True)
class Stage:
    """Fetch a version into every rank's host memory while the engine serves; answered by one ShardReport a rank."""

    version: int | Literal["latest"]


@dataclass(frozen=True, slots=True)
class Install:
    """Copy what is staged into every rank's memory in one round; answered by one ShardReport a rank."""


@dataclass(frozen=True, slots=True)
class Discard:
    """Drop what is staged on any rank."""


@dataclass(frozen=True, slots=True)
class Process:
    """Re-run the engine's post-load processing on every rank; answered by one ShardReport a rank."""


@dataclass(frozen=True, slots=True)
class ResetCaches:
    """Reset everything computed with old weights; answered by True only if it was verified."""


@dataclass(frozen=True, slots=True)
class Publish:
    """Publish the copies that are not offered yet; answered by one ShardReport a rank."""


@dataclass(frozen=True, slots=True)
class Withdraw:
    """Take every rank's copy back for good: its memory is about to go; answered by one ShardReport a rank."""


@dataclass(frozen=True, slots=True)
class SetVersion:
    """Tell the engine which version its answers come from."""

    version: int


@dataclass(frozen=True, slots=True)
class Resume:
    """Go on with generation."""


Step = (
    Look | Stage | Pause | Update | Install | Discard | Process | ResetCaches | Publish | Withdraw | SetVersion | Resume
)
Steps = Generator[Step, Any, T]
S = TypeVar("S")


@dataclass(frozen=True, slots=True)
class SwapTimes:
    """Seconds of the parts of the last swap that changed the version; `drain_s`: waiting for running requests.

    `total_s` is how long the engine stood still. `stage_s`: how long the bytes took before that, None if not staged.
    """

    mode: SwapMode
    drain_s: float
    transfer_s: float
    process_s: float
    total_s: float
    stage_s: float | None = None


@dataclass(frozen=True, slots=True)
class EngineStatus:
    """What the engine serves and how it got there: the body of `GET /tensorhub/version`."""

    model: str
    replica: str
    state: State = "serving"
    version: int | None = None
    epoch: int = 0
    error: str | None = None
    code: str = ""
    shards: tuple[ShardReport, ...] = ()
    last_swap: SwapTimes | None = None

    def as_json(self) -> dict[str, Any]:
        """Return the public form."""
        times = self.last_swap
        return {
            "version": self.version,
            "epoch": self.epoch,
            "model": self.model,
            "replica": self.replica,
            "state": self.state,
            "error": self.error,
            "shards": [
                {
                    "shard": report.shard,
                    "version": report.version,
                    "source": report.source,
                    "digest": report.digest,
                    "total_bytes": report.total_bytes,
                    **({"note": report.note} if report.note else {}),
                }
                for report in self.shards
            ],
            "last_swap": None
            if times is None
            else {
                "mode": times.mode,
                "drain_s": times.drain_s,
                "transfer_s": times.transfer_s,
                "process_s": times.process_s,
                "total_s": times.total_s,
                **({} if times.stage_s is None else {"stage_s": times.stage_s}),
            },
        }


@dataclass(frozen=True, slots=True)
class SwapOutcome:
    """How one swap ended: `version` is served by every shard, or `code` and `message` say why not."""

    version: int | None
    changed: bool
    code: str = ""
    message: str = ""

    @property
    def ok(self) -> bool:
        """Tell whether every shard is proven to serve the version that was asked for."""
        return not self.code


def drive(steps: Generator[S, Any, T], perform: Callable[[S], Any]) -> T:
    """Run a transaction with a synchronous adapter: `perform` carries out one step and returns its answer."""
    try:
        step = next(steps)
        while True:
            try:
                answer = perform(step)
            except Exception as error:
                step = steps.throw(error)
            else:
                step = steps.send(answer)
    except StopIteration as end:
        return end.value  # type: ignore[no-any-return]


async def drive_async(steps: Generator[S, Any, T], perform: Callable[[S], Awaitable[Any]]) -> T:
    """Run a transaction with an asynchronous adapter."""
    try:
        step = next(steps)
        while True:
            try:
                answer = await perform(step)
            except Exception as error:
                step = steps.throw(error)
            else:
                step = steps.send(answer)
    except StopIteration as end:
        return end.value  # type: ignore[no-any-return]


def http_status(code: str) -> int:
    """Return the HTTP status of an outcome's `code`; 200 for none."""
    return {
        "": 200,
        "config_error": 400,
        "version_unavailable": 404,
        "layout_mismatch": 409,
        "version_conflict": 409,
        "state_error": 409,
        "registration_error": 409,
        "corrupt_transfer": 502,
        "server_unreachable": 503,
        "deadline_exceeded": 504,
    }.get(code, 500)
