"""The index of what can be read: a choice looks at few copies however many there are, and finds what a scan finds."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from tensorhub_core.schedule.policy import AUTO
from tensorhub_core.state import choosing
from tensorhub_core.state.choosing import MOST_EQUALS, MOST_FOLLOWED, choose_among, choose_by_scan
from tensorhub_core.state.context import Step
from tensorhub_core.state.invariants import check
from tensorhub_core.state.messages import Announce, Committed, Done, Filling, Leave, Ok, Promise, Published
from tensorhub_core.state.records import ServerState
from tests.sim.hub import Hub, Peer
from tests.sim.world import World

SUMS = b"sums"


def reader(hub: Hub, name: str, **place: str) -> tuple[Peer, Promise]:
    peer = hub.hello(name, **place)
    peer.register(b"a")
    return peer, peer.answer(peer.join(0), Promise)


def fleet(size: int, *, whole: bool) -> Hub:
    """A publisher, and readers that fill behind each other or hold it already."""
    hub = Hub(policy=AUTO)
    trainer = hub.hello("trainer")
    trainer.register(b"a")
    trainer.publish(1, SUMS, Published)
    for number in range(size):
        if whole:
            peer = hub.hello(f"r{number}")
            peer.register(b"a")
            peer.publish(1, SUMS, Published, held_epoch=1)
        else:
            peer, _ = reader(hub, f"r{number}")
            peer.call(Filling(0), Ok)
            peer.call(Announce(0, 1, 100), Ok)
    return hub


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("layout", [b"a", b"b"])
def test_a_choice_looks_at_few_copies_however_many_there_are(
    monkeypatch: pytest.MonkeyPatch, layout: bytes, whole: bool
) -> None:
    looked = []
    count = 0

    def counting(original: Callable[..., object]) -> Callable[..., object]:
        def counted(*args: object, **more: object) -> object:
            nonlocal count
            count += 1
            return original(*args, **more)

        return counted

    for name in ("candidate_of", "may_be_read"):
        monkeypatch.setattr(choosing, name, counting(getattr(choosing, name)))
    for size in (40, 160):
        hub = fleet(size, whole=whole)
        late = hub.hello("late")
        late.register(layout)
        count = 0
        late.answer(late.join(0), Promise)
        looked.append(count)
        assert check(hub.state) == []
    assert max(looked) <= MOST_FOLLOWED + 4 * MOST_EQUALS


def places() -> Iterator[dict[str, str]]:
    chance = random.Random(7)
    while True:
        zone, host = chance.choice(["", "east", "west"]), chance.choice(["", "one", "two"])
        yield {"zone": zone, "host": host, "rail": chance.choice(["", "r0", "r1"])}


def differences(state: ServerState) -> list[str]:
    """Return the readers for which the index finds something else than a scan of everything."""
    s, found = Step(state, state.now_s), []
    for worker in state.workers.values():
        if worker.observer or worker.memory is None:
            continue
        for key in s.model(worker).holders:
            for promised in (False, True):
                mine = [copy.id for copy in choose_among(s, worker, key, promised, ())]
                if mine != [copy.id for copy in choose_by_scan(s, worker, key, promised, ())]:
                    found.append(f"{worker.replica}/{worker.shard}: {mine}")
    return found


@pytest.mark.parametrize("lag_bytes", [0, 1, 100, 400])
def test_the_index_finds_what_a_scan_finds_while_readers_come_and_go(lag_bytes: int) -> None:
    hub, where, chance = Hub(policy=replace(AUTO, lag_bytes=lag_bytes)), places(), random.Random(lag_bytes)
    for name in ("trainer", "other"):
        peer = hub.hello(name, **next(where))
        peer.register(b"a")
        peer.publish(1, SUMS, Published, held_epoch=None if name == "trainer" else 1)
    readers = []
    for number in range(30):
        peer = hub.hello(f"r{number}", **next(where))
        peer.register(b"a")
        peer.join(0)
        readers.append(peer)
        if chance.random() < 0.7:
            peer.call(Filling(0), Ok)
            peer.call(Announce(0, 1, 100), Ok)
            if chance.random() < 0.4:
                peer.call(Done(0, peer.put(SUMS)), Committed)
        if chance.random() < 0.2:
            readers.pop(chance.randrange(len(readers))).call(Leave(), Ok)
        assert check(hub.state) == []
        assert differences(hub.state) == []


def test_the_nearest_nic_group_is_found_among_any_number_of_equals() -> None:
    hub = Hub(policy=AUTO)
    for number in range(40):
        peer = hub.hello(f"r{number}", host=f"h{number}", rail="rail-1" if number == 30 else "rail-0")
        peer.register(b"a")
        peer.publish(1, SUMS, Published, held_epoch=1 if number else None)
    _, promise = reader(hub, "late", host="late", rail="rail-1")
    assert promise.sources[0].replica == "r30"
    assert differences(hub.state) == []


def test_readers_beside_a_copy_count_before_a_hop_that_costs_nothing() -> None:
    """On links with equally many readers, a copy with fewer readers of its own machine is better, whole or not."""
    hub = Hub(policy=AUTO)
    trainer = hub.hello("trainer", host="home")
    trainer.register(b"a")
    trainer.publish(1, SUMS, Published)
    for number in range(3):
        reader(hub, f"beside{number}", host="home")
    first, _ = reader(hub, "r0", host="one")
    first.call(Filling(0), Ok)
    first.call(Announce(0, 1, 100), Ok)
    reader(hub, "r1", host="two")
    assert differences(hub.state) == []


def test_the_index_finds_what_a_scan_finds_in_random_worlds() -> None:
    for seed in range(16):
        world = World(seed, 3, 1 + seed % 2, 2, stages=seed % 4 == 0, reshards=seed % 3 == 0, retain=seed % 3)
        for number in range(600):
            world.advance()
            if number % 20 == 0:
                assert differences(world.state) == []
