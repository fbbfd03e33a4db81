"""Step the pure machine through a recorded life of the server, and check the invariants after every step."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from tensorhub_core.errors import ConfigError, ProtocolMismatch
from tensorhub_core.server.journal import EventRecord, Gap, LifeHeader, read_journal
from tensorhub_core.state.events import Received
from tensorhub_core.state.invariants import check
from tensorhub_core.state.machine import ServerState, step
from tensorhub_core.state.messages import PROTOCOL


@dataclass(slots=True)
class Summary:
    """What a replay found. Events are numbered from 1 through all lives of the file."""

    lives: int = 0
    events: int = 0
    gaps: list[Gap] = field(default_factory=list)
    broken_at: int | None = None
    broken_event: str = ""
    broken: list[str] = field(default_factory=list)
    state: ServerState | None = None

    @property
    def sound(self) -> bool:
        """Tell whether every invariant held after every event."""
        return self.broken_at is None


def replay_file(path: Path, until: int | None = None) -> Summary:
    """Replay a journal up to its first broken invariant, or to event `until`; raises ConfigError, ProtocolMismatch.

    A step that raises, and one that gives out other ids than the recorded life did, count as broken.
    """
    summary = Summary()
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            for item in read_journal(file, size):
                if isinstance(item, Gap):
                    summary.gaps.append(item)
                    continue
                if isinstance(item, LifeHeader):
                    _begin(summary, item)
                elif (until is not None and summary.events >= until) or not _take(summary, item):
                    break
    except OSError as error:
        raise ConfigError(f"the journal {path} cannot be read: {error.strerror or error}") from None
    if not summary.lives and size:
        raise ConfigError(f"{path} is not a journal of `tensorhub serve --journal`")
    return summary


def _begin(summary: Summary, header: LifeHeader) -> None:
    if header.protocol != PROTOCOL:
        raise ProtocolMismatch(
            f"the journal is of protocol {header.protocol}, this release speaks {PROTOCOL}: replay it with its own"
        )
    summary.lives += 1
    summary.state = ServerState.new(header.config, header.started_s)


def _take(summary: Summary, record: EventRecord) -> bool:
    """Take one step; tell whether all is well after it."""
    state = summary.state
    if state is None:  # its life's header was lost
        return True
    summary.events += 1
    event = record.event()
    if state.counter != record.counter:
        broken = [f"the machine had given out {state.counter} ids before, and {record.counter} when it was recorded"]
    else:
        try:
            summary.state, _ = step(state, event, record.now)
            broken = check(summary.state)
        except Exception as error:  # the machine never may
            broken = [f"it raised {type(error).__name__}: {error}"]
    if broken:
        summary.broken_at, summary.broken = summary.events, broken
        summary.broken_event = type(event.message if isinstance(event, Received) else event).__name__
    return not broken
