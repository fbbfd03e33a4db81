"""Own the host memory in which versions are staged, with a data plane of its own that fills and serves it.

A transport of its own, because memory may be freed only after the serving side that shows it has ended (law L9): the
registered memory goes on serving through another one.
"""

from __future__ import annotations

from collections.abc import Callable

from tensorhub_core.client.memory import RegisteredMemory
from tensorhub_core.client.prefix_word import PrefixPage, with_page
from tensorhub_core.client.reading import Executor
from tensorhub_core.client.staged_memory import Arena, StagedMemory, storage_lengths
from tensorhub_core.errors import StateError
from tensorhub_core.ids import VersionKey
from tensorhub_core.state.messages import PutBlob
from tensorhub_core.transport.base import Transport


class StagingRoom:
    """The staging memory of one worker: allocated by the first stage, used again by later ones of the same sizes."""

    def __init__(self, make_transport: Callable[[], Transport], make_executor: Callable[[Transport], Executor]) -> None:
        self._make_transport, self._make_executor = make_transport, make_executor
        self._transport: Transport | None = None
        self._executor: Executor | None = None
        self._arena: Arena | None = None
        self._page = PrefixPage()
        self._not_to_be_freed: list[Arena] = []
        self.memory: StagedMemory | None = None
        self.placement: bytes = b""
        """Tells peers where the staging memory lies."""
        self.holds: tuple[VersionKey, PutBlob, bool] | None = None
        """The version that is there, and its checksums."""

    @property
    def executor(self) -> Executor:
        """Return the thread that fills the memory; only while the room is open."""
        assert self._executor is not None
        return self._executor

    def fits(self, live: RegisteredMemory) -> bool:
        """Tell whether the memory that is there can take a version for `live`."""
        return self._arena is not None and self._arena.lengths == storage_lengths(live)

    def open(self, live: RegisteredMemory, limit_bytes: int | None) -> StagedMemory:
        """Return memory for a version of `live`'s layout; nobody may be reading what was there before.

        Raises StateError if that takes more than `limit_bytes` or more than there is, TransportError.
        """
        needed = sum(storage_lengths(live))
        if limit_bytes is not None and needed > limit_bytes:
            raise StateError(
                f"staging takes {needed:,} bytes of host memory, the setting staging_bytes allows {limit_bytes:,}: "
                "raise it, or call update()"
            )
        if not self.fits(live):
            self.close()
            try:
                self._arena = Arena(storage_lengths(live))
            except MemoryError:
                raise StateError(f"staging takes {needed:,} bytes of host memory, which there are not") from None
        assert self._arena is not None
        self.memory = StagedMemory(live, self._arena, self._page)
        if self._transport is None:
            self._connect(self._arena, self.memory)
        return self.memory

    def _connect(self, arena: Arena, memory: StagedMemory) -> None:
        transport, regions, agent = self._make_transport(), with_page(arena.regions(), memory.page), b""
        self._transport, self._executor = transport, self._make_executor(transport)
        try:
            if regions:
                transport.register(regions)
                agent = transport.describe()
        except BaseException:
            self.close()
            raise
        self.placement = memory.placement(transport.name, agent)

    def close(self) -> None:
        """Free the memory, after its readers were cut off and reads into it have ended; idempotent.

        If that cannot be made sure, raises what went wrong and keeps the memory for good.
        """
        arena, executor, transport = self._arena, self._executor, self._transport
        self._arena = self._executor = self._transport = self.memory = self.holds = None
        try:
            if executor is not None:
                executor.close()
            if transport is not None:
                transport.shutdown()
        except BaseException:
            if arena is not None:
                self._not_to_be_freed.append(arena)
            raise
