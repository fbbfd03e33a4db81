"""What a message costs the machine does not grow with the workers: counted, not timed.

The containers of the state count what is looked at when somebody goes through them. With thousands of workers every
message may look at a bounded number of records, and at one more for each that it tells something; what only time brings
about may look at all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, KeysView, ValuesView
from collections.abc import ItemsView as Items
from typing import Any

import pytest

from tensorhub_core.schedule.speed import Speed
from tensorhub_core.state import names
from tensorhub_core.state.events import Disconnected, Event, Received, Tick
from tensorhub_core.state.messages import (
    Announce,
    Available,
    Committed,
    Done,
    Failure,
    Filling,
    Heartbeat,
    Held,
    LeaseFailure,
    Leave,
    Ok,
    Promise,
    Published,
    Relocate,
    Unpublish,
    Wait,
)
from tensorhub_core.state.records import ModelState, ServerState, VersionRecord
from tests.sim.hub import Hub, Peer, digest

WORKERS = 4096
BOUND = 100
"""What a message may look at, whatever the number of workers."""
EACH = 4
"""And for each message that is sent."""
TICK = 8
TICK_READING = 20
"""What a tick may look at for each worker, and for each that reads."""


class Looked:
    """How many records were looked at."""

    count = 0


def counting(iterator: Iterator[Any]) -> Iterator[Any]:
    for each in iterator:
        Looked.count += 1
        yield each


class CountingDict(dict[Any, Any]):
    """A dictionary that counts those whom somebody goes through."""

    def __iter__(self) -> Iterator[Any]:
        return counting(super().__iter__())

    def __reversed__(self) -> Iterator[Any]:
        return counting(super().__reversed__())

    def keys(self) -> Any:
        return KeysView(self)

    def values(self) -> Any:
        return ValuesView(self)

    def items(self) -> Any:
        return Items(self)

    def __setitem__(self, key: Any, value: Any) -> None:
        super().__setitem__(key, counted(value))

    def setdefault(self, key: Any, default: Any = None) -> Any:
        return super().setdefault(key, counted(default))


class CountingSet(set[Any]):
    """A set that does so as well; comparing and combining sets looks at the smaller one at most."""

    def __iter__(self) -> Iterator[Any]:
        return counting(super().__iter__())

    def __le__(self, other: Any) -> bool:
        Looked.count += len(self) if len(self) <= len(other) else 0
        return super().__le__(other)

    def __and__(self, other: Any) -> Any:
        Looked.count += min(len(self), len(other))
        return super().__and__(other)

    def __rand__(self, other: Any) -> Any:
        return self.__and__(other)


class CountingList(list[Any]):
    """A list that does so as well."""

    def __iter__(self) -> Iterator[Any]:
        return counting(super().__iter__())


def counted(value: Any) -> Any:
    """Return a container of the state that counts."""
    if isinstance(value, VersionRecord):
        for name in ("whole", "held", "firm", "custody", "let_go"):
            setattr(value.keeping, name, counted(getattr(value.keeping, name)))
    kinds: dict[type, Callable[[Any], Any]] = {dict: CountingDict, set: CountingSet, list: CountingList}
    return kinds.get(type(value), lambda same: same)(value)


class CountedModel(ModelState):
    def __setattr__(self, name: str, value: object) -> None:
        super().__setattr__(name, counted(value))


class CountedState(ServerState):
    def __setattr__(self, name: str, value: object) -> None:
        super().__setattr__(name, counted(value))


class CountingHub(Hub):
    """A hub that notes what each message looked at beyond what it told others."""

    def __init__(self, **config: float) -> None:
        super().__init__(**config)
        self.state = CountedState.new(self.config, self.now)
        self.most: dict[str, int] = {}

    def feed(self, event: Event) -> None:
        told = sum(len(peer.answers) + len(peer.pushes) for peer in self.watched)
        before = Looked.count
        super().feed(event)
        looked = Looked.count - before
        told = sum(len(peer.answers) + len(peer.pushes) for peer in self.watched) - told
        kind = type(event.message).__name__ if isinstance(event, Received) else type(event).__name__
        self.most[kind] = max(self.most.get(kind, 0), looked - EACH * told)

    watched: tuple[Peer, ...] = ()
    """Who is told much at once; to count what all are told would itself take long."""

    def bounded(self, *kinds: str) -> None:
        """Assert that no message of these kinds has looked at more than it may."""
        assert {kind: self.most[kind] for kind in kinds if self.most[kind] > BOUND} == {}
        self.most.clear()


def count_rates(patch: pytest.MonkeyPatch) -> None:
    """Count how often it is looked how fast a copy fills: that is compared in lists of the moment."""
    slot = Speed.__dict__["bytes_per_s"]

    def read(speed: Speed) -> object:
        Looked.count += 1
        return slot.__get__(speed)

    patch.setattr(Speed, "bytes_per_s", property(read, slot.__set__))


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> CountingHub:
    monkeypatch.setattr(names, "ModelState", CountedModel)
    return CountingHub(grace_s=5.0, dead_after_s=15.0)


def fleet(hub: Hub, name: str = "rollout", count: int = WORKERS) -> list[Peer]:
    """Connect workers that have registered memory and hold nothing."""
    peers = [hub.hello(f"{name}-{number}") for number in range(count)]
    for peer in peers:
        peer.register(b"layout")
    return peers


def come_back(hub: Hub, replica: str, **more: object) -> Peer:
    """Say hello with version 1 in memory."""
    memory = Held(1, 1, digest(b"layout"), digest(b"placement of " + replica.encode()), digest(b"one"), 400, 4)
    return hub.hello(replica, held=memory, high=(1, 1), token=f"token of {replica}", **more)


def holders(hub: Hub) -> list[Peer]:
    """Connect workers that all hold version 1, as after a restart of the server."""
    peers = [come_back(hub, f"rollout-{number}") for number in range(WORKERS)]
    hub.now += 6  # the grace is over; nobody was silent but the server
    hub.feed(Tick())
    return peers


def rest(hub: Hub, peers: list[Peer], seconds: int) -> None:
    for _ in range(seconds):
        hub.now += 1
        for peer in peers:
            peer.ask(Heartbeat())
        hub.feed(Tick())


def read(peer: Peer, number: int, content: bytes) -> None:
    """Go through a round."""
    asked = peer.join(number)
    assert peer.answer(asked, Promise).sources
    peer.call(Filling(number), Ok)
    peer.call(Announce(number, 2, 200), Ok)
    done = peer.ask(Done(number, peer.put(content)))
    peer.answer(done, Committed)


def test_to_connect_and_to_live(hub: CountingHub) -> None:
    peers = fleet(hub)
    rest(hub, peers, 2)
    assert hub.most["Tick"] <= TICK * WORKERS
    for peer in peers[:50]:
        hub.feed(Disconnected(peer.session))
    hub.bounded("Hello", "PutBlob", "Register", "Heartbeat", "Disconnected")


def test_to_read_while_others_are_idle(hub: CountingHub) -> None:
    peers = fleet(hub)
    trainer = hub.hello("trainer")
    trainer.register(b"layout")
    trainer.publish(1, b"one", Published)
    for peer in peers[:20]:
        read(peer, 0, b"one")
    hub.bounded("Publish", "JoinRound", "Filling", "Announce", "Done")


def test_to_come_back(hub: CountingHub) -> None:
    """Everybody says hello again, to a server that has restarted or over a connection that was lost."""
    holders(hub)
    hub.most.clear()
    for number in range(50):
        come_back(hub, f"rollout-{number}")
    hub.bounded("Hello")


def test_to_leave(hub: CountingHub) -> None:
    peers = fleet(hub)
    for peer in peers:
        peer.ask(Wait())
    hub.most.clear()
    for peer in peers[:50]:
        peer.call(Leave(), Ok)
    hub.bounded("Leave")


def test_to_be_told_of_a_version(hub: CountingHub) -> None:
    peers = fleet(hub)
    for peer in peers:
        peer.ask(Wait())
    hub.bounded("Wait")
    hub.watched = tuple(peers)
    trainer = hub.hello("trainer")
    trainer.register(b"layout")
    hub.most.clear()
    trainer.publish(1, b"one", Published)
    assert all(isinstance(peer.answers[max(peer.answers)], Available) for peer in peers)
    hub.bounded("Publish")


def test_to_keep_a_version_among_spot_workers(hub: CountingHub) -> None:
    """Nobody is compared with all that hold a version which only spot workers hold."""
    for number in range(WORKERS):
        come_back(hub, f"rollout-{number}", spot=True)
    hub.now += 6
    trainer = hub.hello("trainer")
    trainer.register(b"layout")
    trainer.publish(2, b"two", Published)
    peers = fleet(hub, "late", 20)
    hub.most.clear()
    for peer in peers:
        read(peer, 0, b"two")
    hub.bounded("Filling", "Announce", "Done")


def test_to_withdraw_what_many_hold(hub: CountingHub) -> None:
    peers = holders(hub)
    hub.most.clear()
    for peer in peers[:20]:
        peer.call(Unpublish(), Ok)
    hub.bounded("Unpublish")


def test_to_be_heard_again(hub: CountingHub) -> None:
    """All were cut off, and nobody is dead yet."""
    peers = holders(hub)
    for _ in range(3):
        hub.now += 1.9
        hub.feed(Tick())
    assert all(worker.suspected for worker in hub.state.workers.values())
    hub.most.clear()
    for peer in peers[:50]:
        peer.call(Heartbeat(), Ok)
    hub.bounded("Heartbeat")


def test_to_choose_among_many_holders(hub: CountingHub) -> None:
    holders(hub)
    peers = fleet(hub, "late", 20)
    hub.most.clear()
    for peer in peers:
        read(peer, 0, b"one")
    hub.bounded("JoinRound", "Filling", "Announce", "Done")


def test_to_read_all_at_once(hub: CountingHub, monkeypatch: pytest.MonkeyPatch) -> None:
    """Everybody is promised the version before anybody begins, and then all of them fill for a while."""
    count_rates(monkeypatch)
    peers = fleet(hub, count=512)
    trainer = hub.hello("trainer")
    trainer.register(b"layout")
    trainer.publish(1, b"one", Published)
    for peer in peers:
        peer.answer(peer.join(0), Promise)
    for peer in peers:
        peer.call(Filling(0), Ok)
    hub.bounded("JoinRound", "Filling")
    for prefix in (1, 2):
        for peer in peers:
            peer.call(Announce(0, prefix, 100 * prefix), Ok)
        rest(hub, [trainer, *peers], 4)
    assert hub.most["Tick"] <= TICK_READING * len(peers)
    for peer in peers:
        peer.answer(peer.ask(Done(0, peer.put(b"one"))), Committed)
    hub.bounded("Announce", "Done")


def test_to_lose_the_last_source(hub: CountingHub) -> None:
    """The trainer dies while all read from each other: each hears in its turn that nobody has the version."""
    peers = fleet(hub, count=512)
    trainer = hub.hello("trainer")
    trainer.register(b"layout")
    trainer.publish(1, b"one", Published)
    leases = [peer.answer(peer.join(0), Promise).sources[0].lease for peer in peers]
    for peer in peers:
        peer.call(Filling(0), Ok)
    trainer.call(Leave(), Ok)
    hub.most.clear()
    for peer, lease in zip(peers, leases, strict=True):
        failed = peer.answer(peer.ask(Relocate(0, (LeaseFailure(lease, "lost"),))), Failure)
        assert "nobody holds any version now" in failed.message
    hub.bounded("Relocate")


def test_waits_that_were_answered_do_not_count(hub: CountingHub) -> None:
    trainer = hub.hello("trainer")
    trainer.register(b"layout")
    trainer.publish(1, b"one", Published)
    reader = hub.hello("reader")
    for _ in range(3 * hub.config.max_deferred):
        reader.call(Wait(), Available)
    for _ in range(hub.config.max_deferred):
        reader.ask(Wait((1, 1)))
    reader.refused(Wait((1, 1)), "state_error")
