"""Follow a model's versions: decide when to wait, when to swap and how long to back off. Steps as in `swap`."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from typing import Any

from tensorhub_core.engine.steps import EngineStatus, SwapOutcome
from tensorhub_core.ids import VersionKey

FIRST_PAUSE_S = 0.5
LONGEST_PAUSE_S = 30.0
PERMANENT = ("layout_mismatch", "version_conflict", "registration_error", "config_error")
"""Errors that the same version would cause again: wait for a newer one instead."""


@dataclass(frozen=True, slots=True)
class WaitNewer:
    """Block until a whole version newer than this is available (None = any); answered by its (epoch, number).

    Answered by None if nothing came in the adapter's time for one wait: then the status is looked at again.
    """

    newer_than: VersionKey | None


@dataclass(frozen=True, slots=True)
class SwapTo:
    """Swap to the newest version; answered by the SwapOutcome."""


@dataclass(frozen=True, slots=True)
class Sleep:
    """Do nothing for some seconds."""

    seconds: float


FollowStep = WaitNewer | SwapTo | Sleep


@dataclass
class Follower:
    """Decide the follow loop of one engine. `status` is read before every wait."""

    first_s: float = FIRST_PAUSE_S
    longest_s: float = LONGEST_PAUSE_S

    def steps(self, status: Any) -> Generator[FollowStep, Any, None]:
        """Yield the loop's steps for ever; `status()` returns the engine's EngineStatus. Close it to end."""
        pause_s = self.first_s
        skip: VersionKey | None = None
        while True:
            try:
                found = yield WaitNewer(_newer_than(status(), skip))
                if found is None:
                    continue
                outcome = yield SwapTo()
            except Exception:
                outcome = SwapOutcome(None, False, "error", "the step failed")
                found = None
            if outcome.ok:
                pause_s, skip = self.first_s, None
                if not outcome.changed:  # the server announced what it then did not give: do not spin
                    yield Sleep(pause_s)
                continue
            if outcome.code in PERMANENT and found is not None:
                skip = found
            yield Sleep(pause_s)
            pause_s = min(self.longest_s, pause_s * 2)


def _newer_than(status: EngineStatus, skip: VersionKey | None) -> VersionKey | None:
    """Return what to wait past: the version that is served (None takes any), or the one that was refused."""
    held = (status.epoch, status.version) if status.version is not None else None
    known = [key for key in (held, skip) if key is not None]
    return max(known) if known else None
