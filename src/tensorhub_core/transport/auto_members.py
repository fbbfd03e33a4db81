"""Keep the transports that `auto` consists of: made when needed, each knowing the memory that it can move."""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from tensorhub_core.errors import TransportError
from tensorhub_core.observe.log import get_logger
from tensorhub_core.transport.base import Region, Transport
from tensorhub_core.transport.description import WAYS
from tensorhub_core.transport.host import Host, rdma_devices, this_host
from tensorhub_core.transport.paths import serving_ways

_FRAGILE_FIRST = ("nixl", "tcp", "cma")
"""The order of registering: what is most likely to refuse comes while nothing else has been registered."""


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What the choice depends on: where this process is, whether NIXL is installed and RDMA devices are there."""

    host: Host | None
    nixl: bool
    rdma: bool


def surroundings() -> Surroundings:
    """Look around; loads nothing."""
    try:
        nixl = importlib.util.find_spec("nixl") is not None
    except ValueError:  # somebody has put something without a spec in its place
        nixl = False
    return Surroundings(this_host(), nixl, bool(rdma_devices()))


@dataclass(slots=True)
class Member:
    """One transport. `local` is the staging memory it was given, `epoch` counts how often it has lost its peers."""

    transport: Transport
    serves: bool = False
    local: tuple[Region, ...] = ()
    epoch: int = 0
    open_reads: int = 0


class Members:
    """The members by way, the regions they serve between them, and the staging memory their reads may write."""

    def __init__(self, make: Callable[[str], Transport], around: Surroundings) -> None:
        """Make those that cost nothing; raises TransportError with every reason if no way works here."""
        self.around = around
        self.regions: list[Region] = []
        self.local: list[Region] = []
        self._make = make
        self._made: dict[str, Member] = {}
        self._refused: dict[str, str] = {}
        if not [way for way in ("cma", "tcp") if self._has(way)] and not self._has("nixl"):
            raise TransportError("no transport works on this machine: " + _listed(self._refused.items()))

    def __getitem__(self, way: str) -> Member:
        """Return a member, made now if it is the first time; raises TransportError saying why it cannot be had."""
        if not self._has(way):
            raise TransportError(self._refused[way])
        return self._made[way]

    def ways(self, devices: bool) -> tuple[str, ...]:
        """Return the ways that should serve; `devices`: there is memory that is not a CPU's."""
        working = {way: way not in self._refused for way in WAYS}
        working["nixl"] = working["nixl"] and self.around.nixl
        return serving_ways(**working, rdma=self.around.rdma, devices=devices)

    def register(self, added: Sequence[Region]) -> None:
        """Serve more regions in every way that should; raises TransportError and serves what it did before.

        A way that cannot serve memory of the CPU is left out, with a warning, if another one can.
        """
        device = next((region.device for region in (*self.regions, *added) if region.device != "cpu"), None)
        if device is not None and not self._has("nixl"):
            raise TransportError(f"memory on {device!r} is moved by NIXL alone: {self._refused['nixl']}")
        wanted, refusals, serving = self.ways(device is not None), [], 0
        for way in (way for way in _FRAGILE_FIRST if way in wanted and self._has(way)):
            try:
                self._serve(way, added)
                serving += 1
            except TransportError as error:
                if device is not None and way == "nixl":
                    raise
                refusals.append((way, str(error)))
                self._leave(way, error)
        if not serving:
            raise TransportError("this memory cannot be served: " + _listed([*self._refused.items(), *refusals]))
        self.regions += added
        self.sync_all()

    def set_local(self, regions: Sequence[Region]) -> None:
        """Let reads write to staging memory; raises TransportError and keeps the last set."""
        before, self.local = self.local, list(regions)
        try:
            self.sync_all()
        except TransportError:
            self.local = before
            for way in self._made:
                with contextlib.suppress(TransportError):
                    self.sync(way)
            raise

    def descriptions(self) -> list[bytes]:
        """Return an envelope of every member that serves something."""
        serving = [way for way in WAYS if way in self._made and self._made[way].serves and self._moved(way)]
        return [self._made[way].transport.describe() for way in serving]

    def deregister(self) -> None:
        """Forget all regions."""
        self.regions, self.local = [], []
        for member in self._made.values():
            member.serves, member.local = False, ()
        self._all("deregister", self._made)

    def revoke(self) -> None:
        """Drop the serving side of every member."""
        self.regions = []
        serving = [way for way, member in self._made.items() if member.serves]
        for way in serving:
            self._made[way].serves = False
        self._all("revoke", serving)

    def fence(self) -> None:
        """Fence every member, also when one of them cannot be; raises TransportError afterwards."""
        for member in self._made.values():
            member.open_reads = 0
        self._all("fence", self._made)

    def shutdown(self) -> None:
        """End every member."""
        self._all("shutdown", self._made)

    def sync_all(self) -> None:
        """Let the reads of every member write wherever reads may."""
        for way in self._made:
            self.sync(way)

    def sync(self, way: str) -> None:
        """Let a member's reads write wherever reads may: to one that does not serve all of it is staging memory.

        A member with open reads has to wait for the next time.
        """
        member = self._made[way]
        local = self._moved(way, self.local)
        self._give_local(member, local if member.serves else [*self._moved(way), *local])

    def _has(self, way: str) -> bool:
        if way not in self._made and way not in self._refused:
            try:
                self._made[way] = Member(self._make(way))
            except TransportError as error:
                self._refused[way] = str(error)
        return way in self._made

    def _moved(self, way: str, regions: Sequence[Region] | None = None) -> list[Region]:
        """Return the regions that a way can move."""
        regions = self.regions if regions is None else regions
        return [region for region in regions if way == "nixl" or region.device == "cpu"]

    def _serve(self, way: str, added: Sequence[Region]) -> None:
        member = self._made[way]
        if not member.serves:
            added = [*self.regions, *added]
            # What its reads were lent as staging memory is registered from here on.
            self._give_local(member, self._moved(way, self.local))
        try:
            member.transport.register(self._moved(way, added))
        except TransportError:
            member.epoch += 1
            raise
        member.serves = True

    def _leave(self, way: str, error: TransportError) -> None:
        """Serve no longer in a way that failed."""
        get_logger("transport").warning("memory is not served by %s: %s", way, error)
        self._made[way].serves = False
        self._all("revoke", [way])

    def _give_local(self, member: Member, regions: Sequence[Region]) -> None:
        if member.local == tuple(regions) or member.open_reads:
            return
        try:
            member.transport.register_local(regions)
        except TransportError:
            member.epoch += 1
            raise
        member.local = tuple(regions)

    def _all(self, call: str, ways: Iterable[str]) -> None:
        """Call a method of all these members, whatever one of them raises; then raise TransportError."""
        errors = []
        for way in ways:
            try:
                getattr(self._made[way].transport, call)()
            except Exception as error:
                errors.append((way, str(error)))
        if errors:
            raise TransportError(f"{call} failed: {_listed(errors)}")


def _listed(reasons: Iterable[tuple[str, str]]) -> str:
    return "; ".join(f"{way}: {reason}" for way, reason in reasons)
