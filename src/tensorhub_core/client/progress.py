"""Hear how far a read is, and tell the caller; tell what broke it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from tensorhub_core.client.prefix_word import PrefixPage
from tensorhub_core.client.reading import ReadHandle
from tensorhub_core.layout.types import Layout

ProgressCallback = Callable[[int, int, str], None]
"""Called with (done_bytes, total_bytes, source_replica)."""

CheckCallback = Callable[[Sequence[Layout]], None]
"""Called with the layouts of a version's sources before anything is written; raises LayoutMismatch to refuse it."""

_CALLBACK_S = 0.12
"""With the last call, which is never held back, at most ten calls in any second."""


class ReadProgress:
    """Hear the executor: keep the newest figures, call the user's callback not too often, never raise."""

    def __init__(self, callback: ProgressCallback | None, broken: Callable[[BaseException], None]) -> None:
        self._callback = callback
        self._broken = broken
        self._called_s = 0.0
        self.replicas: dict[str, str] = {}
        self.shown: tuple[PrefixPage, int] | None = None
        """Where followers see how far the read is, and the tag of what is read."""
        self.figures = (0, 0)
        """(verified reads from the start of the plan, verified bytes); replaced as a whole."""

    def end(self) -> None:
        """Let go of the round, so that its memory goes when it is dropped and not with some later collection."""
        self._callback, self._broken, self.shown = None, lambda error: None, None

    def show(self, page: PrefixPage, tag: int | None) -> None:
        """Let followers see from now on how far the next read is, of what has this tag (None: of nothing)."""
        page.clear()
        self.shown = None if tag is None else (page, tag)

    def on_progress(self, prefix: int, done_bytes: int, total_bytes: int, lease: str) -> None:
        """Hear how far the read is; on the executor's thread."""
        shown, self.figures = self.shown, (prefix, done_bytes)
        if shown is not None:
            shown[0].show(shown[1], prefix)
        now = time.monotonic()
        if self._callback is None or (now - self._called_s < _CALLBACK_S and done_bytes < total_bytes):
            return
        self._called_s = now
        try:
            first = next(iter(self.replicas.values()), "")
            self._callback(done_bytes, total_bytes, self.replicas.get(lease, first))
        except BaseException as error:  # the caller's own: it ends the round, not the executor's thread
            self._callback = None
            self._broken(error)


def breaks(handle: ReadHandle, error: Exception) -> bool:
    """Tell whether an error came from the read job: it then comes every time."""
    try:
        handle.wait(0.0)
    except Exception as again:
        return type(again) is type(error)
    return False
