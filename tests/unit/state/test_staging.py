"""Staged copies and installs in the server machine (laws L2, L3, L12, L13)."""

from __future__ import annotations

import pytest

from tensorhub_core.state.invariants import check
from tensorhub_core.state.messages import (
    Announce,
    Available,
    Committed,
    Done,
    Failure,
    Filling,
    JoinRound,
    LeaseLost,
    LeaveRound,
    ListVersions,
    NothingNewer,
    Ok,
    Promise,
    Published,
    RegisterStaging,
    RoundAborted,
    SourceProgress,
    Unstage,
    Versions,
)
from tests.sim.hub import Hub, Peer

V1, V2 = (1, 1), (1, 2)


def replica(hub: Hub, name: str, shards: int = 1) -> list[Peer]:
    """Connect the shards of a replica, with registered and staging memory."""
    peers = [hub.hello(name, k, shards) for k in range(shards)]
    for k, p in enumerate(peers):
        p.register(b"layout %d" % k)
        p.call(RegisterStaging(p.put(b"staging of " + p.session)), Ok)
    return peers


def sums(number: int, shard: int) -> bytes:
    return b"sums %d %d" % (number, shard)


def publish(peers: list[Peer], number: int) -> None:
    for k, p in enumerate(peers):
        p.publish(number, sums(number, k), Published)


def fill(peers: list[Peer], number: int, round_number: int) -> list[int]:
    """Fill at once what is promised; return the numbers of the Done requests."""
    for p in peers:
        p.call(Filling(round_number), Ok)
    return [p.ask(Done(round_number, p.put(sums(number, k)))) for k, p in enumerate(peers)]


def stage(peers: list[Peer], number: int, round_number: int = 0, have: tuple[int, int] | None = None) -> None:
    """Stage a version at all shards."""
    asked = [p.join(round_number, mode="stage", have=have) for p in peers]
    assert [p.answer(n, Promise).number for p, n in zip(peers, asked, strict=True)] == [number] * len(peers)
    for p, n in zip(peers, fill(peers, number, round_number), strict=True):
        assert p.answer(n, Committed).published


def holding_v1(hub: Hub, shards: int = 1) -> tuple[list[Peer], list[Peer]]:
    """Make a trainer that publishes version 2, and a reader that still publishes version 1."""
    trainer, reader = replica(hub, "trainer", shards), replica(hub, "reader", shards)
    publish(trainer, 1)
    asked = [p.join(0) for p in reader]
    assert all(p.answer(n, Promise) for p, n in zip(reader, asked, strict=True))
    for p, n in zip(reader, fill(reader, 1, 0), strict=True):
        p.answer(n, Committed)
    for p in trainer:
        p.answer(p.unpublish(), Ok)
    publish(trainer, 2)
    return trainer, reader


def replicas_of(peer: Peer, number: int) -> tuple[str, ...]:
    rows = peer.call(ListVersions(), Versions).rows
    return next((row.replicas for row in rows if row.number == number), ())


def sound(hub: Hub) -> None:
    assert check(hub.state) == []


def test_the_old_copy_serves_while_the_new_one_is_staged_and_then_both_do() -> None:
    hub = Hub()
    trainer, (reader,) = holding_v1(hub)
    asked = reader.join(1, mode="stage", have=V1)
    reader.answer(asked, Promise)
    reader.call(Filling(1), Ok)
    assert replicas_of(reader, 1) == ("reader",)
    other = replica(hub, "other")[0]
    assert other.answer(other.join(0, 1), Promise).sources[0].replica == "reader"
    other.ask(LeaveRound(0, "deadline_exceeded", ""))
    reader.answer(reader.ask(Done(1, reader.put(sums(2, 0)))), Committed)
    assert (replicas_of(reader, 1), replicas_of(reader, 2)) == (("reader",), ("reader", "trainer"))
    trainer[0].answer(trainer[0].unpublish(), Ok)
    (source,) = other.answer(other.join(1, 2), Promise).sources
    assert (source.replica, source.placement) == ("reader", reader.put(b"staging of " + reader.session))
    sound(hub)


def test_the_prefix_of_a_copy_that_is_being_staged_is_followed() -> None:
    hub = Hub()
    _trainer, (reader,) = holding_v1(hub)
    reader.answer(reader.join(1, mode="stage", have=V1), Promise)
    reader.call(Filling(1), Ok)
    reader.call(Announce(1, 2), Ok)
    other = replica(hub, "other")[0]
    (source,) = other.answer(other.join(0, 2), Promise).sources
    assert (source.replica, source.whole, source.prefix) == ("reader", False, 2)
    reader.call(Announce(1, 3), Ok)
    assert other.pushed(SourceProgress)[-1].prefix == 3
    reader.answer(reader.ask(Done(1, reader.put(sums(2, 0)))), Committed)
    assert other.pushed(SourceProgress)[-1].whole
    sound(hub)


def test_nothing_is_staged_that_is_held_already() -> None:
    hub = Hub()
    trainer, (reader,) = holding_v1(hub)
    trainer[0].answer(trainer[0].unpublish(), Ok)
    assert reader.answer(reader.join(1, 1, mode="stage", have=V1), NothingNewer).number == 1
    sound(hub)


def test_a_stage_commits_for_all_shards_or_for_none() -> None:
    hub = Hub()
    _trainer, reader = holding_v1(hub, shards=2)
    for p in reader:
        p.join(1, mode="stage", have=V1)
    for p in reader:
        p.call(Filling(1), Ok)
    done = reader[0].ask(Done(1, reader[0].put(sums(2, 0))))
    assert done not in reader[0].answers
    assert replicas_of(reader[0], 2) == ("trainer",)
    reader[1].call(LeaveRound(1, "deadline_exceeded", "too slow"), Ok)
    assert reader[0].answer(done, Failure).code == "deadline_exceeded"
    assert all(w.staged is None for w in hub.state.workers.values())
    assert replicas_of(reader[0], 1) == ("reader",), "what they held is untouched"
    sound(hub)


def test_shards_that_do_different_things_at_the_same_time_are_told() -> None:
    hub = Hub()
    trainer, reader = holding_v1(hub, shards=2)
    trainer[0].answer(trainer[0].unpublish(), Ok)
    reader[0].join(1, 3, mode="stage")
    refused = reader[1].join(1, 3, mode="update")
    assert "different things" in reader[1].answer(refused, Failure).message


def test_staging_memory_comes_first() -> None:
    hub = Hub()
    holding_v1(hub)
    other = hub.hello("other", 0, 1)
    other.refused(RegisterStaging(b"x"), "state_error")
    other.register(b"layout 0")
    other.refused(RegisterStaging(b"x"), "state_error")
    other.refused(JoinRound(0, mode="stage"), "state_error")


def test_an_install_waits_for_all_shards_and_publishes_them_together() -> None:
    hub = Hub()
    _trainer, reader = holding_v1(hub, shards=2)
    stage(reader, 2, 1, V1)
    first = reader[0].join(2, mode="install", have=V2)
    assert first not in reader[0].answers, "the other shard may not have staged it"
    second = reader[1].join(2, mode="install", have=V2)
    for p, n in ((reader[0], first), (reader[1], second)):
        promise = p.answer(n, Promise)
        assert (promise.epoch, promise.number, promise.sources) == (*V2, ())
        p.refused(Filling(2), "state_error")
        p.answer(p.unpublish(), Ok)
    done = fill(reader, 2, 2)
    assert replicas_of(reader[0], 2) == ("reader", "trainer"), "the staged copy still serves"
    for p, n in zip(reader, done, strict=True):
        assert p.answer(n, Committed).published
        p.call(Unstage(), Ok)
    assert replicas_of(reader[0], 2) == ("reader", "trainer")
    sound(hub)


def test_what_is_being_installed_is_not_offered_before_it_is_complete() -> None:
    hub = Hub()
    trainer, reader = holding_v1(hub)
    stage(reader, 2, 1, V1)
    reader[0].answer(reader[0].join(2, mode="install", have=V2), Promise)
    reader[0].answer(reader[0].unpublish(), Ok)
    reader[0].call(Filling(2), Ok)
    reader[0].call(Unstage(), Ok)
    trainer[0].answer(trainer[0].unpublish(), Ok)
    other = replica(hub, "other")[0]
    assert other.answer(other.join(0, 2), Failure).code == "version_unavailable"
    sound(hub)


def test_shards_that_staged_different_versions_install_nothing() -> None:
    hub = Hub()
    _trainer, reader = holding_v1(hub, shards=2)
    stage(reader, 2, 1, V1)
    reader[1].call(Unstage(), Ok)
    first = reader[0].join(2, mode="install", have=V2)
    second = reader[1].join(2, mode="install", have=(1, 3))
    for p, n in ((reader[0], first), (reader[1], second)):
        assert "different versions" in p.answer(n, Failure).message
    sound(hub)


def test_an_install_claims_no_other_version_than_the_one_that_is_known_to_be_staged() -> None:
    hub = Hub()
    _trainer, reader = holding_v1(hub)
    stage(reader, 2, 1, V1)
    reader[0].refused(JoinRound(2, mode="install", have=(1, 3)), "state_error")
    reader[0].refused(JoinRound(2, mode="install"), "state_error")


@pytest.mark.parametrize("joined_before", [True, False])
def test_nobody_installs_when_a_shard_dies_with_what_it_staged(joined_before: bool) -> None:
    hub = Hub(join_timeout_s=30.0)
    _trainer, reader = holding_v1(hub, shards=2)
    stage(reader, 2, 1, V1)
    if joined_before:
        asked = reader[0].join(2, mode="install", have=V2)
        hub.later(20.0, silent=(reader[1],))
        assert reader[0].answer(asked, Failure).code == "state_error"
    else:
        hub.later(20.0, silent=(reader[1],))
        asked = reader[0].join(2, mode="install", have=V2)
        hub.later(29.0)
        assert asked not in reader[0].answers
        hub.later(2.0)
        assert reader[0].answer(asked, Failure).code == "deadline_exceeded"
    worker = hub.state.workers[hub.state.sessions[reader[0].session]]
    assert worker.copy is not None
    assert worker.copy.key == V1, "it still holds and offers what it had"
    assert not worker.dirty
    sound(hub)


def test_a_shard_that_dies_in_the_middle_of_an_install_breaks_it_for_all() -> None:
    hub = Hub()
    trainer, reader = holding_v1(hub, shards=2)
    stage(reader, 2, 1, V1)
    for p in reader:
        p.join(2, mode="install", have=V2)
    for p in reader:
        p.answer(p.unpublish(), Ok)
        p.call(Filling(2), Ok)
    done = reader[0].ask(Done(2, reader[0].put(sums(2, 0))))
    for p in trainer:
        p.answer(p.unpublish(), Ok)
    hub.later(20.0, silent=(reader[1],))
    assert reader[0].answer(done, Failure).code == "state_error"
    assert replicas_of(reader[0], 2) == ()
    assert hub.state.workers[hub.state.sessions[reader[0].session]].dirty
    sound(hub)


def test_who_joins_an_install_again_names_the_version_that_it_was_promised() -> None:
    hub = Hub()
    _trainer, (reader,) = holding_v1(hub)
    stage([reader], 2, 1, V1)
    reader.answer(reader.join(2, mode="install", have=V2), Promise)
    reader.call(Unstage(), Ok)
    again = reader.ask(JoinRound(2, None, "install", (1, 3), again=True))
    assert "different versions" in reader.answer(again, Failure).message
    sound(hub)


def test_an_aborted_install_leaves_the_staged_copy_to_try_again() -> None:
    hub = Hub()
    _trainer, reader = holding_v1(hub)
    stage(reader, 2, 1, V1)
    reader[0].join(2, mode="install", have=V2)
    reader[0].answer(reader[0].unpublish(), Ok)
    reader[0].call(Filling(2), Ok)
    reader[0].call(LeaveRound(2, "deadline_exceeded", ""), Ok)
    assert replicas_of(reader[0], 2) == ("reader", "trainer")
    reader[0].answer(reader[0].join(3, mode="install", have=V2), Promise)
    (done,) = fill(reader, 2, 3)
    assert reader[0].answer(done, Committed).published
    sound(hub)


def test_an_install_that_was_committed_says_so_to_a_worker_that_lost_the_answer() -> None:
    hub = Hub()
    _trainer, reader = holding_v1(hub)
    stage(reader, 2, 1, V1)
    reader[0].join(2, mode="install", have=V2)
    reader[0].answer(reader[0].unpublish(), Ok)
    fill(reader, 2, 2)
    assert reader[0].answer(reader[0].join(3, mode="install", have=V2), NothingNewer).number == 2


def test_a_restarted_server_believes_what_is_staged_and_still_binds_the_bytes() -> None:
    hub = Hub()
    trainer = replica(hub, "trainer")
    publish(trainer, 2)
    (reader,) = replica(hub, "reader")
    reader.answer(reader.join(0, mode="install", have=V2), Promise)
    reader.call(Filling(0), Ok)
    reader.call(Announce(0, 4), Ok)
    assert reader.answer(reader.ask(Done(0, reader.put(b"other bytes"))), Failure).code == "corrupt_transfer"
    reader.answer(reader.join(1, mode="install", have=V2), Promise)
    reader.call(Filling(1), Ok)
    assert reader.answer(reader.ask(Done(1, reader.put(sums(2, 0)))), Committed).published
    sound(hub)


def test_a_staged_copy_is_dropped_when_its_readers_have_left() -> None:
    hub = Hub()
    trainer, reader = holding_v1(hub)
    stage(reader, 2, 1, V1)
    trainer[0].answer(trainer[0].unpublish(), Ok)
    other, late = (replica(hub, name)[0] for name in ("other", "late"))
    other.answer(other.join(0, 2), Promise)
    asked = reader[0].ask(Unstage())
    assert asked not in reader[0].answers
    assert late.answer(late.join(0, 2), Failure).code == "version_unavailable"
    other.call(Filling(0), Ok)
    other.answer(other.ask(Done(0, other.put(sums(2, 0)))), Committed)
    reader[0].answer(asked, Ok)
    reader[0].call(Unstage(), Ok)
    assert replicas_of(other, 1) == ("reader",), "the copy beside it stays"
    sound(hub)


def test_giving_up_what_is_being_staged_breaks_the_stage_for_all() -> None:
    hub = Hub()
    _trainer, reader = holding_v1(hub, shards=2)
    for p in reader:
        p.join(1, mode="stage", have=V1)
        p.call(Filling(1), Ok)
    reader[0].call(Unstage(), Ok)
    assert [m.round for m in reader[1].pushed(RoundAborted)] == [1]
    sound(hub)


def test_a_silent_worker_is_not_followed_into_its_staging_memory() -> None:
    hub = Hub()
    _trainer, (reader,) = holding_v1(hub)
    reader.join(1, mode="stage", have=V1)
    reader.call(Filling(1), Ok)
    reader.call(Announce(1, 2), Ok)
    other = replica(hub, "other")[0]
    (source,) = other.answer(other.join(0, 2), Promise).sources
    assert source.replica == "reader"
    hub.later(7.0, silent=(reader,))
    assert [m.lease for m in other.pushed(LeaseLost)] == [source.lease]
    sound(hub)


def test_who_waits_is_answered_when_only_a_staged_copy_offers_the_version() -> None:
    hub = Hub()
    trainer, (reader,) = holding_v1(hub)
    reader.join(1, mode="stage", have=V1)
    reader.call(Filling(1), Ok)
    leaving = trainer[0].unpublish()
    waiting = reader.wait(V1)
    assert waiting not in reader.answers
    reader.answer(reader.ask(Done(1, reader.put(sums(2, 0)))), Committed)
    trainer[0].answer(leaving, Ok)
    assert reader.answer(waiting, Available).number == 2


def test_a_staged_version_is_not_what_the_worker_publishes() -> None:
    hub = Hub()
    _trainer, (reader,) = holding_v1(hub)
    stage([reader], 2, 1, V1)
    status = hub.state.workers[hub.state.sessions[reader.session]]
    assert status.copy is not None
    assert (status.copy.key, status.staged is not None) == (V1, True)
    update = reader.join(2, mode="update", have=V1)
    assert reader.answer(update, Promise).number == 2, "an update still has to fetch it"
    sound(hub)
