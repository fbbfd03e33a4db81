"""All shards of a replica get one version by one verdict, whoever asks, publishes, dies or restarts in between (L2)."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from tensorhub_core.state.invariants import check
from tensorhub_core.state.messages import (
    Announce,
    Committed,
    Discard,
    Done,
    Failure,
    Filling,
    Hello,
    LeaseLost,
    LeaveRound,
    NothingNewer,
    Ok,
    Promise,
    Published,
    Relocate,
    Reply,
    RoundAborted,
    Superseded,
    Welcome,
)
from tests.sim.hub import PROTOCOL, Hub, Peer
from tests.unit.state.test_rounds import A, fill, publish, trainer

Actor = Iterator[None]


def interleave(hub: Hub, actors: list[Actor], seed: int, limit: int = 5_000) -> None:
    """Let the actors take turns by chance until all are through; every law holds after every turn."""
    chance = random.Random(seed)
    for turn in range(limit):
        if not actors:
            return
        actor = chance.choice(actors)
        if next(actor, actors) is actors:
            actors.remove(actor)
        assert check(hub.state) == []
        if turn % 50 == 49:
            hub.later(0.5)
    raise AssertionError(f"somebody waits for ever (seed {seed})")


def publishing(peers: list[Peer], k: int, number: int) -> Actor:
    yield
    peers[k].publish(number, b"sums %d %d" % (number, k), Published)
    yield


def asking(peer: Peer, heard: list[Reply], want: int | None = None, **more: object) -> Actor:
    """Join round 0 and take its first answer."""
    yield
    asked = peer.join(0, want, **more)
    while asked not in peer.answers:
        yield
    heard.append(peer.answers[asked])


def updating(peer: Peer, number: int, have: int, heard: list[Reply]) -> Actor:
    """Update from `have` to whatever is promised in one round, relocating and reading again where told."""
    asked = peer.join(number, mode="update", have=(1, have))
    while asked not in peer.answers:
        yield
    promise = peer.answers[asked]
    heard.append(promise)
    if not isinstance(promise, Promise):
        return
    withdrawn = peer.unpublish()
    while withdrawn not in peer.answers:
        yield
    peer.call(Filling(number), Ok)
    lost = len(peer.pushed(LeaseLost))
    for prefix in (1, 3):
        yield
        peer.ask(Announce(number, prefix))
    if len(peer.pushed(LeaseLost)) > lost:
        moved = peer.ask(Relocate(number, ()))
        while moved not in peer.answers:
            yield
        peer.answer(moved, Promise)
    while True:
        asked = peer.ask(Done(number, peer.put(b"sums %d %d" % (promise.number, peer.shard))))
        while asked not in peer.answers:
            yield
        if not isinstance(peer.answers[asked], Discard):
            heard.append(peer.answer(asked, Committed))
            return


@pytest.mark.parametrize("first", range(0, 1000, 250))
def test_shards_that_ask_for_latest_around_a_publish_get_the_same(first: int) -> None:
    """A thousand interleavings: version 7 is there, 8 is published shard by shard, the reader's shards ask."""
    promised = set()
    for seed in range(first, first + 250):
        hub = Hub()
        publish(trainer(hub, "seven", 2), 7)
        new, r = trainer(hub, "new", 2), trainer(hub, "reader", 2)
        heard: list[Reply] = []
        actors = [publishing(new, k, 8) for k in (0, 1)] + [asking(p, heard) for p in r]
        interleave(hub, actors, seed)
        numbers = {reply.number for reply in heard if isinstance(reply, Promise)}
        assert (len(heard), len(numbers)) == (2, 1), heard
        promised |= numbers
    assert promised == {7, 8}, "both happen"


@pytest.mark.parametrize("seed", range(200))
def test_nothing_newer_or_the_new_version_for_all_shards(seed: int) -> None:
    hub = Hub()
    t, r = trainer(hub, shards=2), trainer(hub, "reader", 2)
    publish(t, 7)
    for k, p in enumerate(r):
        p.publish(7, b"sums 7 %d" % k, Published, held_epoch=1)
    new = trainer(hub, "new", 2)
    heard: list[Reply] = []
    asks = [asking(p, heard, mode="update", have=(1, 7)) for p in r]
    interleave(hub, [*asks, publishing(new, 0, 8), publishing(new, 1, 8)], seed)
    assert len({type(reply) for reply in heard}) == 1, heard
    assert len(heard) == 2


@pytest.mark.parametrize("mode", ["replicate", "update"])
def test_who_asks_for_a_half_published_version_waits_until_its_deadline(mode: str) -> None:
    hub = Hub()
    t, r, latest = trainer(hub, shards=2), trainer(hub, "reader", 2), trainer(hub, "latest", 2)
    publish(trainer(hub, "old", 2), 8)
    t[0].publish(9, b"sums 9 0", Published)
    asked = [p.join(0, 9, mode=mode) for p in r]
    assert latest[0].answer(latest[0].join(0, mode=mode), Promise).number == 8, "nobody else sees it"
    hub.later(30.0)
    assert [n in p.answers for p, n in zip(r, asked, strict=True)] == [False, False]
    r[0].call(LeaveRound(0, "deadline_exceeded", "the deadline passed"), Ok)
    for p, n in zip(r, asked, strict=True):
        failure = p.answer(n, Failure)
        assert failure.code == "deadline_exceeded"
        assert "version 9 at trainer/0" in failure.message
    asked = [p.join(1, 9, mode=mode) for p in r]
    t[1].publish(9, b"sums 9 1", Published)
    assert {p.answer(n, Promise).number for p, n in zip(r, asked, strict=True)} == {9}


@pytest.mark.parametrize("verdict", ["aborted", "nothing newer"])
def test_verdicts_are_kept_for_a_shard_that_asks_rounds_later(verdict: str) -> None:
    hub = Hub()
    publish(trainer(hub, shards=2), 1)
    r = trainer(hub, "reader", 2)
    for k, p in enumerate(r):
        p.publish(1, b"sums 1 %d" % k, Published, held_epoch=1)
    for number in range(3):
        if verdict == "aborted":
            r[0].join(number)
            r[0].call(LeaveRound(number, "corrupt_transfer", f"try {number}"), Ok)
        else:
            r[0].answer(r[0].join(number, mode="update", have=(1, 1)), NothingNewer)
    publish(trainer(hub, "new", 2), 2)
    for number in range(3):
        kind = Failure if verdict == "aborted" else NothingNewer
        answer = r[1].answer(r[1].join(number, mode="update", have=(1, 1)), kind)
        assert not isinstance(answer, Failure) or f"try {number}" in answer.message
    asked = [p.join(3, mode="update", have=(1, 1)) for p in r]
    assert {p.answer(n, Promise).number for p, n in zip(r, asked, strict=True)} == {2}


def restarted(hub: Hub, replica: str, shard: int, shards: int) -> tuple[Peer, int]:
    """Start a shard's process again; return it and the round that it may join first."""
    peer = hub.peer(f"{replica}/{shard}")
    peer.shard = shard
    welcome = peer.call(Hello(PROTOCOL, peer.session.decode(), "policy", replica, shard, shards), Welcome)
    peer.register(A + b"%d" % shard)
    return peer, welcome.next_round


@pytest.mark.parametrize("when", ["before it asks", "when it has asked", "while it reads", "when it is done"])
@pytest.mark.parametrize("who", [0, 1])
def test_a_shard_that_is_restarted_within_a_round_breaks_it_for_all_and_the_next_is_one_again(
    when: str, who: int
) -> None:
    hub = Hub()
    publish(trainer(hub, shards=2), 1)
    r = trainer(hub, "reader", 2)
    other = r[1 - who]
    promise = other.answer(other.join(0), Promise)
    waiting = fill(other, 0, promise, b"sums 1 %d" % other.shard)
    old = r[who]
    if when != "before it asks":
        own = old.answer(old.join(0), Promise)
    if when == "while it reads":
        old.call(Filling(0), Ok)
    if when == "when it is done":
        fill(old, 0, own, b"sums 1 %d" % who)
    new, number = restarted(hub, "reader", who, 2)
    if when == "when it is done":
        assert other.answer(waiting, Committed).published, "all were done: it is committed for all"
    else:
        assert other.answer(waiting, Failure).code == "state_error"
    assert len(old.pushed(Superseded)) == 1
    assert number == 1
    have = (1, 1) if when == "when it is done" else None
    asked = other.join(1, mode="update", have=have), new.join(number, mode="update")
    assert other.answer(asked[0], Promise).number == new.answer(asked[1], Promise).number == 1
    assert check(hub.state) == []


def test_what_belongs_to_a_round_that_is_over_means_nothing_in_the_next() -> None:
    hub = Hub()
    publish(trainer(hub, shards=2), 1)
    r = trainer(hub, "reader", 2)
    for p in r:
        p.answer(p.join(0), Promise)
        p.call(Filling(0), Ok)
    r[0].call(LeaveRound(0, "state_error", "gone wrong"), Ok)
    promise = r[0].answer(r[0].join(1), Promise)
    r[0].call(Filling(1), Ok)
    (aborted,) = r[1].pushed(RoundAborted)
    assert aborted.round == 0
    for late in (Announce(0, 3), Relocate(0, ()), Done(0, r[1].put(b"sums 1 1")), Filling(0)):
        assert isinstance(r[1].answers[r[1].ask(late)], Failure)
    r[1].call(LeaveRound(0, "state_error", "I stop too"), Ok)
    assert r[0].pushed(RoundAborted) == []
    done = r[0].ask(Done(1, r[0].put(b"sums 1 0")))
    assert r[1].answer(r[1].join(1), Promise).number == promise.number
    r[1].call(Filling(1), Ok)
    assert r[1].call(Done(1, r[1].put(b"sums 1 1")), Committed).published
    r[0].answer(done, Committed)


def test_a_replica_has_one_round_at_a_time() -> None:
    hub = Hub()
    publish(trainer(hub, shards=2), 1)
    r = trainer(hub, "reader", 2)
    r[0].answer(r[0].join(0), Promise)
    for number in (1, 7):
        failure = r[1].answer(r[1].join(number), Failure)
        assert failure.code == "state_error"
        assert "0 can" in failure.message
    assert r[1].answer(r[1].join(0), Promise).number == 1


@pytest.mark.parametrize("late", ["asks", "has asked"])
def test_a_promise_breaks_for_all_shards_together(late: str) -> None:
    hub = Hub()
    t = trainer(hub, shards=2)
    publish(t, 1)
    r = trainer(hub, "reader", 2)
    promise = r[0].answer(r[0].join(0), Promise)
    done = fill(r[0], 0, promise, b"sums 1 0")
    if late == "has asked":
        r[1].answer(r[1].join(0), Promise)
        r[1].call(Filling(0), Ok)
    hub.later(hub.config.dead_after_s + 1, silent=(t[1],))
    if late == "asks":
        assert r[1].answer(r[1].join(0), Failure).code == "version_unavailable"
    else:
        assert r[1].call(Relocate(0, ()), Failure).code == "version_unavailable"
    assert r[0].answer(done, Failure).code == "version_unavailable"
    assert not any(
        c.key == (1, 1) and hub.state.workers[c.worker].replica == "reader" for c in hub.state.copies.values()
    )
    assert check(hub.state) == []


@pytest.mark.parametrize("seed", range(60))
def test_all_replicas_update_at_once_from_the_only_holder(seed: int) -> None:
    """Everybody holds version 1 and replaces it in place by 2, which only the trainer has; then the trainer goes on."""
    hub = Hub(worth_waiting_bytes=0 if seed % 2 else 1 << 30)
    t = trainer(hub, shards=2)
    replicas = [trainer(hub, f"r{n}", 2) for n in range(4)]
    publish(t, 1)
    for peers in replicas:
        for k, p in enumerate(peers):
            p.publish(1, b"sums 1 %d" % k, Published, held_epoch=1)
    for p in t:
        p.answer(p.unpublish(), Ok)
    publish(t, 2)
    heard: dict[str, list[Reply]] = {f"r{n}": [] for n in range(4)}
    actors = [updating(p, 0, 1, heard[f"r{n}"]) for n, peers in enumerate(replicas) for p in peers]
    interleave(hub, actors, seed)
    for replies in heard.values():
        assert [r.number for r in replies if isinstance(r, Promise)] == [2, 2]
        assert [r.published for r in replies if isinstance(r, Committed)] == [True, True]
    withdrawn = [p.unpublish() for p in t]
    for p, n in zip(t, withdrawn, strict=True):
        p.answer(n, Ok)
    assert hub.state.leases == {}


def test_a_connection_that_says_hello_as_another_shard_is_that_one_from_then_on() -> None:
    """It was the replica's only member until then, so that the replica was forgotten in between."""
    hub = Hub()
    peer = hub.hello("reader", 0, 2)
    peer.call(Hello(PROTOCOL, "another", "policy", "reader", 1, 2), Welcome)
    peer.register(b"layout")
    assert [worker.shard for worker in hub.state.workers.values()] == [1]
    assert check(hub.state) == []
    hub.later(hub.config.dead_after_s + 1.0, silent=(peer,))
    assert not hub.state.workers, "it is buried like anybody else"
