"""Replicas around the server machine that publish, fill, withdraw and offload, for tests of retention."""

from __future__ import annotations

from tensorhub_core.state.invariants import check
from tensorhub_core.state.messages import (
    Committed,
    Done,
    DropOffload,
    Filling,
    ListVersions,
    Offload,
    Offloaded,
    OffloadKept,
    Ok,
    Promise,
    Published,
    RegisterStaging,
    Unpublish,
    Versions,
)
from tests.sim.hub import Hub, Peer

SIZE = 400
"""Bytes of a shard."""


def sums(number: int, shard: int) -> bytes:
    return b"sums %d %d" % (number, shard)


def replica(hub: Hub, name: str, shards: int = 1, **about: object) -> list[Peer]:
    """Connect the shards of a replica, with registered and staging memory."""
    peers = [hub.hello(name, k, shards, **about) for k in range(shards)]
    for k, p in enumerate(peers):
        p.register(b"layout %d" % k)
        p.call(RegisterStaging(p.put(b"staging of " + p.session)), Ok)
    return peers


def publish(peers: list[Peer], number: int) -> None:
    for k, p in enumerate(peers):
        p.publish(number, sums(number, k), Published)


def unpublish(peers: list[Peer]) -> list[int]:
    return [p.ask(Unpublish()) for p in peers]


def answered(peers: list[Peer], requests: list[int]) -> list[bool]:
    """Tell which shards were answered; an answer has to be Ok."""
    for p, n in zip(peers, requests, strict=True):
        assert n not in p.answers or p.answer(n, Ok)
    return [n in p.answers for p, n in zip(peers, requests, strict=True)]


def offload(peer: Peer) -> str:
    """Make the offload copy that a shard was asked for last; return the id of the new copy."""
    asked = peer.pushed(Offload)[-1]
    placement = peer.put(b"offload %d of %s" % (asked.number, peer.session))
    return peer.call(Offloaded(asked.copy, placement), OffloadKept).copy


def offloads_asked(*peers: Peer) -> list[int]:
    """Return the versions of which offload copies were asked for."""
    return [push.number for p in peers for push in p.pushed(Offload)]


def dropped(*peers: Peer) -> list[str]:
    """Return the copies that were to be freed, or given up."""
    return [push.copy for p in peers for push in p.pushed(DropOffload)]


def join(peers: list[Peer], number: int, want: int | None = None, **more: object) -> list[int]:
    """Join a round with all shards."""
    return [p.join(number, want, **more) for p in peers]


def promised(peers: list[Peer], requests: list[int]) -> int:
    """Return the version that all shards were promised."""
    (number,) = {p.answer(n, Promise).number for p, n in zip(peers, requests, strict=True)}
    return number


def begin(peers: list[Peer], number: int) -> None:
    """Begin to fill the registered memory in a round."""
    for p in peers:
        p.call(Filling(number), Ok)


def commit(peers: list[Peer], number: int, version: int) -> None:
    """End a round that fills."""
    asked = [p.ask(Done(number, p.put(sums(version, k)))) for k, p in enumerate(peers)]
    for p, n in zip(peers, asked, strict=True):
        assert p.answer(n, Committed).published


def replicate(peers: list[Peer], number: int = 0, want: int | None = None) -> int:
    """Fill the registered memory, which holds nothing, with a version; return which it was."""
    version = promised(peers, join(peers, number, want))
    begin(peers, number)
    commit(peers, number, version)
    return version


def source_of(peer: Peer, request: int) -> str:
    """Return the replica that a shard is to read from."""
    (source,) = peer.answer(request, Promise).sources
    return source.replica


def rows(peer: Peer) -> dict[int, tuple[bool, bool, list[str]]]:
    """Return of each version that somebody holds whether it is whole and retained, and its replicas."""
    found = peer.call(ListVersions(), Versions).rows
    return {row.number: (row.whole, row.retained, list(row.replicas)) for row in found}


def lawful(hub: Hub) -> None:
    """Check all invariants."""
    assert check(hub.state) == []
