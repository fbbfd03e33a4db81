"""End a command in order when it is told to: SIGTERM like Ctrl-C, and while serving neither as an accident."""

from __future__ import annotations

import signal
from types import FrameType


class Stop:
    """Turn SIGTERM and SIGINT into KeyboardInterrupt, so that what is half done is undone.

    From `begin_serving()` on the first signal only makes `wanted()` true, and one more means impatience, which is a
    KeyboardInterrupt again. Make it on the main thread.
    """

    def __init__(self) -> None:
        self._wanted = False
        self._serving = False
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._hear)

    def _hear(self, number: int, frame: FrameType | None) -> None:
        if not self._serving or self._wanted:
            raise KeyboardInterrupt
        self._wanted = True

    def begin_serving(self) -> None:
        """Take the next signal as the wish to end in order."""
        self._serving = True

    def wanted(self) -> bool:
        """Tell whether the end is wanted."""
        return self._wanted
