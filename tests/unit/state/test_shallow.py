"""Who follows whom when many ask at once: behind each other, but not one behind the other where that can be helped."""

from __future__ import annotations

import pytest

from tensorhub_core.schedule.policy import AUTO
from tensorhub_core.state.messages import Filling, Ok, Promise, Published, Unpublish
from tests.sim.hub import Hub, Peer

PER_HOST = 8
HOSTS = 16


def fleet(hub: Hub, segments: int = 1 << 20) -> list[Peer]:
    """Connect a trainer, and readers of large copies: eight a machine, each with a NIC of its own."""
    peers = [hub.hello("trainer", host="trainer", rail="0")]
    for number in range(HOSTS * PER_HOST):
        host, rail = divmod(number, PER_HOST)
        peers.append(hub.hello(f"r{number}", host=f"host {host}", rail=str(rail)))
    for peer in peers:
        peer.register(b"layout", segments)
    return peers


def depths(hub: Hub) -> list[int]:
    return [copy.depth for worker in hub.state.workers.values() if (copy := worker.unfinished()) is not None]


@pytest.mark.parametrize("renewed", [False, True])
def test_readers_that_ask_at_once_form_a_tree_over_the_nics_of_their_machines(renewed: bool) -> None:
    hub = Hub(policy=AUTO)
    trainer, *readers = fleet(hub)
    if renewed:
        for peer in readers:
            peer.publish(1, b"one", Published)
    trainer.publish(2, b"two", Published)
    for peer in readers:
        peer.answer(peer.join(0, mode="update"), Promise)
        if renewed:
            peer.call(Unpublish(), Ok)
        peer.call(Filling(0), Ok)
    found = depths(hub)
    assert len(found) == HOSTS * PER_HOST
    assert max(found) < 12, "a chain of all would be 127 deep"
    egress = hub.state.flows.egress
    assert max(egress.values()) == 1, "no NIC sends two copies"
    assert sum(egress.values()) == HOSTS, "one of each machine reads over the network"


def test_a_copy_that_nobody_reads_is_not_better_than_one_with_fewer_hops() -> None:
    hub = Hub(policy=AUTO)
    trainer, first, beside, other = (
        hub.hello(name, host=host, rail=rail)
        for name, host, rail in (("t", "t", "0"), ("a0", "a", "0"), ("a1", "a", "1"), ("b0", "b", "0"))
    )
    for peer in (trainer, first, beside, other):
        peer.register(b"layout", 1 << 20)
    trainer.publish(1, b"one", Published)
    sources = [peer.answer(peer.join(0), Promise).sources[0].replica for peer in (first, beside, other)]
    assert sources == ["t", "a0", "a0"], "a neighbour reads a0 beside its NIC, which is as idle as that of a1"
