"""Rank the ways between two peers: the whole choice of `auto`, pure.

NIXL is what RDMA and device memory need. Between CPU memories without RDMA our own ways are as fast or faster, start at
once, and a reader that dies cannot harm the process that it reads (docs/decisions/0006).
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass

from tensorhub_core.transport.host import Host


@dataclass(frozen=True, slots=True)
class Side:
    """One of two peers: the ways it has, where it is (None = it does not say), whether it has RDMA devices."""

    ways: Set[str]
    host: Host | None = None
    rdma: bool = False


@dataclass(frozen=True, slots=True)
class Way:
    """A transport and why it comes at its place."""

    transport: str
    reason: str


def serving_ways(*, cma: bool, tcp: bool, nixl: bool, rdma: bool, devices: bool) -> tuple[str, ...]:
    """Return the ways by which a side serves, of those that work there.

    `devices`: memory that is not a CPU's is registered.
    """
    needed = nixl and (rdma or devices or not (cma or tcp))
    return tuple(way for way, serves in (("cma", cma), ("nixl", needed), ("tcp", tcp)) if serves)


def rank(here: Side, there: Side, *, cpu: bool, suspects: Set[str] = frozenset()) -> tuple[Way, ...]:
    """Return the ways that both sides have, best first, for memory of CPUs (`cpu`), or of any device on either side.

    `suspects` did not work last time: they come last.
    """
    common = here.ways & there.ways
    neighbours = here.host is not None and here.host == there.host
    if not cpu:
        return (Way("nixl", "memory of a device"),) if "nixl" in common else ()
    order = []
    if neighbours:
        order.append(Way("cma", "both processes are on this machine"))
    if here.rdma and there.rdma:
        order.append(Way("nixl", "both sides have RDMA"))
        order.append(Way("tcp", "RDMA needs NIXL on both sides"))
    order.append(Way("tcp", "not both sides have RDMA"))
    order += [Way(name, "the peer offers nothing better") for name in sorted(common, reverse=True)]
    found: dict[str, Way] = {}
    for way in order:
        if way.transport in common and (way.transport != "cma" or _may_be_near(here, there)):
            found.setdefault(way.transport, way)
    return tuple(sorted(found.values(), key=lambda way: way.transport in suspects))


def forecast(here: Side) -> tuple[Way, Way]:
    """Return the way to a process like this one on this machine, and on another one that is like it."""
    none = Way("nothing", "no transport works")
    elsewhere = Side(here.ways, Host("elsewhere", 0, 0), here.rdma)
    within, between = (rank(here, there, cpu=True) for there in (here, elsewhere))
    return (within or (none,))[0], (between or (none,))[0]


def _may_be_near(here: Side, there: Side) -> bool:
    """Tell whether a process of the other side may be seen from here."""
    if here.host is None or there.host is None:
        return True
    return (here.host.boot_id, here.host.pid_namespace) == (there.host.boot_id, there.host.pid_namespace)


def why_none(here: Side, there: Side, *, cpu: bool) -> str:
    """Say why `rank` is empty."""
    offered, known = ", ".join(sorted(there.ways)) or "nothing", ", ".join(sorted(here.ways)) or "nothing"
    if cpu and here.ways & there.ways == {"cma"}:
        return (
            f"the peer serves by {offered}, and by cma a process reads only its own machine's, in one PID namespace, "
            "which the peer's is not: set transport='auto' or 'tcp' for the peer"
        )
    if not cpu:
        need = "this side needs NIXL: pip install 'tensorhub-core[nixl]'"
        if "nixl" in here.ways:
            need = "let the source serve by it: connect(transport='nixl') there"
        return f"memory of a device is moved by nixl, and the peer serves by {offered}; {need}"
    return f"the peer serves by {offered}, this side reads by {known}: give both the same transport, or 'auto'"


def line(agent: str, way: Way, refusals: Sequence[str] = ()) -> str:
    """Say in one line how a peer is read, and what was refused before."""
    text = f"{agent} is read by {way.transport}: {way.reason}"
    return f"{text} (not by {'; '.join(refusals)})" if refusals else text
