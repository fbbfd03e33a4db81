"""Wait for a version to fill from, and say so: an engine that starts before its trainer is no error for a while."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, Protocol

from tensorhub_core.client.observer import Held
from tensorhub_core.client.versions import Version
from tensorhub_core.errors import DeadlineExceeded, ServerUnreachable, VersionUnavailable
from tensorhub_core.ids import VersionKey

TELL_EVERY_S = 10.0
_NOT_YET = (VersionUnavailable, DeadlineExceeded, ServerUnreachable)


class Watch(Protocol):
    """What waiting needs of an observer."""

    @property
    def server(self) -> str:
        """Return the server's address."""

    @property
    def model(self) -> str:
        """Return the model's name."""

    def holders(self, version: int | None, timeout_s: float | None) -> tuple[Version, list[Held]]:
        """Return who holds a version."""

    def wait(self, newer_than: VersionKey | None, timeout_s: float | None) -> Version:
        """Wait for a newer version."""


def await_version(
    observer: Watch,
    wanted: int | Literal["latest"],
    timeout_s: float,
    log: Callable[[str], None],
    now: Callable[[], float],
) -> tuple[Version, list[Held]]:
    """Return the wanted version and who holds it, as soon as it is whole somewhere; log once in `TELL_EVERY_S`.

    Raises DeadlineExceeded after `timeout_s` saying what was waited for, LayoutMismatch. `now`: monotonic seconds.
    """
    began_s = now()
    seen: VersionKey | None = None
    while True:
        left_s = began_s + timeout_s - now()
        try:
            return observer.holders(None if wanted == "latest" else wanted, max(0.05, min(left_s, TELL_EVERY_S)))
        except _NOT_YET as error:
            reason = str(error)
        if left_s <= 0:
            raise DeadlineExceeded(
                f"no {_named(wanted)} of model {observer.model!r} at {observer.server} within {timeout_s:g} s: {reason}"
            )
        try:
            seen = observer.wait(seen, min(left_s, TELL_EVERY_S)).key
        except _NOT_YET:
            waited_s = now() - began_s
            log(
                f"waiting for {_named(wanted)} of model {observer.model!r} at {observer.server} "
                f"({waited_s:.0f} s of {timeout_s:g} s): {reason}"
            )


def _named(wanted: int | Literal["latest"]) -> str:
    return "version" if wanted == "latest" else f"version {wanted}"
