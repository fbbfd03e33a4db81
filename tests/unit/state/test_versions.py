"""Version numbers, streams and conflicts; registration and blobs of the server machine (laws L8, L10, L12)."""

from __future__ import annotations

import pytest

from tensorhub_core.state.events import Disconnected
from tensorhub_core.state.messages import (
    Committed,
    Done,
    Failure,
    Filling,
    GetBlob,
    GetStatus,
    Heartbeat,
    Held,
    Hello,
    ListVersions,
    Ok,
    Promise,
    Published,
    PutBlob,
    Register,
    RoundAborted,
    StatusReply,
    Superseded,
    UnknownSession,
    Versions,
    Welcome,
)
from tests.sim.hub import Hub, Peer, digest


def worker(hub: Hub, name: str, layout: bytes = b"layout", **more: object) -> Peer:
    peer = hub.hello(name, **more)
    peer.register(layout)
    return peer


def move_on(peer: Peer, number: int) -> Published:
    peer.answer(peer.unpublish(), Ok)
    return peer.publish(number, b"sums %d" % number, Published)


def test_publishing_again_is_idempotent_and_other_bytes_conflict() -> None:
    hub = Hub()
    t, other = worker(hub, "trainer"), worker(hub, "other")
    assert t.publish(3, b"bytes", Published) == t.publish(3, b"bytes", Published)
    assert t.publish(3, b"changed", Failure).code == "version_conflict"
    assert other.publish(3, b"other bytes", Failure).code == "version_conflict"
    assert other.publish(3, b"bytes", Published).number == 3


def test_numbers_only_go_up() -> None:
    hub = Hub()
    t = worker(hub, "trainer")
    t.publish(10, b"ten", Published)
    t.answer(t.unpublish(), Ok)
    for number in (2, 9, -1):
        assert t.publish(number, b"again", Failure).code == "version_conflict"
    restarted = worker(hub, "trainer")
    assert restarted.publish(2, b"again", Failure).code == "version_conflict"
    elsewhere = worker(hub, "elsewhere", layout=b"another layout")
    assert elsewhere.publish(2, b"again", Failure).code == "version_conflict"
    assert restarted.publish(11, b"eleven", Published).epoch == 1


def test_a_new_stream_opens_a_new_epoch_and_the_old_one_is_over() -> None:
    hub = Hub()
    old = worker(hub, "trainer", stream="run-1")
    assert old.publish(10, b"ten", Published).epoch == 1
    new = worker(hub, "trainer-2", stream="run-2")
    reader = worker(hub, "reader")
    assert new.publish(0, b"zero", Published).epoch == 2
    promise = reader.answer(reader.join(0), Promise)
    assert (promise.epoch, promise.number) == (2, 0)
    old.answer(old.unpublish(), Ok)
    failure = old.publish(11, b"eleven", Failure)
    assert failure.code == "version_conflict"
    assert "run-2" in failure.message


def test_a_half_published_stream_does_not_hide_the_old_one() -> None:
    hub = Hub()
    worker(hub, "trainer", stream="run-1").publish(10, b"ten", Published)
    half = hub.hello("trainer-2", 0, 2, stream="run-2")
    half.register(b"half")
    half.publish(0, b"zero", Published)
    reader = worker(hub, "reader")
    assert reader.answer(reader.join(0), Promise).number == 10


def test_latest_is_never_an_older_version() -> None:
    hub = Hub()
    t, keeper = worker(hub, "trainer"), worker(hub, "keeper")
    t.publish(1, b"one", Published)
    keeper.publish(1, b"one", Published)
    move_on(t, 2)
    t.answer(t.unpublish(), Ok)
    reader = worker(hub, "reader")
    failure = reader.answer(reader.join(0), Failure)
    assert failure.code == "version_unavailable"
    assert "version 1 at keeper/0" in failure.message
    assert reader.answer(reader.join(1, 1), Promise).number == 1


def test_a_version_that_never_was_is_waited_for() -> None:
    hub = Hub()
    reader = worker(hub, "reader")
    latest = reader.join(0)
    assert latest not in reader.answers
    worker(hub, "trainer").publish(4, b"four", Published)
    assert reader.answer(latest, Promise).number == 4
    other = worker(hub, "other")
    later = other.join(0, 5)
    gone = worker(hub, "third").join(0, 3)
    assert later not in other.answers
    third = next(p for p in hub.peers.values() if p.name == "third/0")
    assert third.answer(gone, Failure).code == "version_unavailable"


def test_a_version_that_never_was_whole_is_forgotten_with_its_copies() -> None:
    hub = Hub()
    half = hub.hello("trainer", 0, 2)
    half.register(b"half")
    half.publish(5, b"first try", Published)
    again = hub.hello("trainer", 0, 2)
    again.register(b"half")
    other = hub.hello("trainer", 1, 2)
    other.register(b"other half")
    other.publish(5, b"second try 1", Published)
    again.publish(5, b"second try 0", Published)
    assert other.call(ListVersions(), Versions).rows[0].whole


def test_a_newcomer_supersedes_the_worker_in_its_place() -> None:
    hub = Hub()
    t = worker(hub, "trainer")
    t.publish(1, b"one", Published)
    reader = hub.hello("reader", 0, 2)
    reader.register(b"r0")
    reader1 = hub.hello("reader", 1, 2)
    reader1.register(b"r1")
    reader.answer(reader.join(0), Promise)
    new = hub.hello("reader", 1, 2)
    assert reader1.pushed(Superseded)
    assert reader.pushed(RoundAborted)[0].round == 0
    before = len(reader1.answers)
    reader1.ask(Heartbeat())
    assert len(reader1.answers) == before
    zombie = hub.peer("zombie")
    token = reader1.session.decode()
    zombie.call(Hello(1, token, "policy", "reader", 1, 2), Superseded)
    new.register(b"r1")
    assert new.answer(new.join(1), Promise).number == 1


def test_another_shard_count_starts_the_replica_again() -> None:
    hub = Hub()
    old = [hub.hello("trainer", k, 2) for k in range(2)]
    for k, p in enumerate(old):
        p.register(b"old %d" % k)
        p.publish(1, b"old %d" % k, Published)
    hub.hello("trainer", 0, 1)
    assert all(p.pushed(Superseded) for p in old)
    reader = worker(hub, "reader")
    assert reader.answer(reader.join(0), Failure).code == "version_unavailable"


def test_a_worker_that_was_forgotten_comes_back_with_its_copy() -> None:
    hub = Hub()
    t = worker(hub, "trainer")
    t.publish(3, b"three", Published)
    hub.later(hub.config.dead_after_s + 1, silent=(t,))
    t.ask(Heartbeat())
    assert t.pushed(UnknownSession)
    blobs = [t.name.encode(), b"placement of " + t.session]
    back = hub.peer("trainer/0")
    held = Held(1, 3, digest(b"layout"), digest(blobs[1]), digest(b"three"), 400, 4)
    back.call(Hello(1, t.session.decode(), "policy", "trainer", held=held, high=(1, 3)), Welcome)
    reader = worker(hub, "reader")
    assert reader.answer(reader.join(0), Promise).sources[0].replica == "trainer"


def test_a_restarted_server_listens_first_and_never_goes_back() -> None:
    hub = Hub(server_epoch=2)
    stale = hub.peer("stale")
    held = Held(1, 3, digest(b"layout"), digest(b"p"), digest(b"three"), 400, 4)
    stale.call(Hello(1, "stale", "policy", "stale", held=held, high=(1, 3)), Welcome)
    reader = hub.hello("reader", high=(1, 4))
    reader.register(b"layout")
    asked = reader.join(0)
    taken = stale.unpublish()
    assert asked not in reader.answers
    assert taken not in stale.answers
    hub.later(hub.config.grace_s + 0.5)
    failure = reader.answer(asked, Failure)
    assert failure.code == "version_unavailable"
    stale.answer(taken, Ok)


def test_a_restarted_server_listens_also_to_who_holds_something_older_than_what_it_knows() -> None:
    hub = Hub(server_epoch=2)
    worker(hub, "trainer").publish(4, b"four", Published)
    stale = hub.peer("stale")
    held = Held(1, 3, digest(b"layout"), digest(b"p"), digest(b"three"), 400, 4)
    stale.call(Hello(1, "stale", "policy", "stale", held=held, high=(1, 3)), Welcome)
    taken = stale.unpublish()
    assert taken not in stale.answers, "somebody who is not back yet may read it"
    hub.later(hub.config.grace_s + 0.5)
    stale.answer(taken, Ok)


def test_a_server_that_was_cut_off_from_everybody_listens_first_too() -> None:
    hub = Hub()
    holder, reader = hub.hello("holder"), hub.hello("reader")
    holder.register(b"layout")
    holder.publish(3, b"three", Published)
    hub.later(hub.config.dead_after_s + 2.0, silent=(holder, reader))
    assert hub.state.workers == {}
    back = hub.hello("reader", high=(1, 3))
    back.register(b"layout")
    asked = back.join(0)
    assert asked not in back.answers, "whoever held it may come back as well"
    hub.later(1.0)
    again = hub.peer("holder")
    held = Held(1, 3, digest(b"layout"), digest(b"p"), digest(b"three"), 400, 4)
    again.call(Hello(1, "holder", "policy", "holder", held=held, high=(1, 3)), Welcome)
    hub.later(hub.config.grace_s)
    assert back.answer(asked, Promise).sources[0].replica == "holder"


def test_a_server_that_nobody_comes_back_to_makes_nobody_wait() -> None:
    hub = Hub()
    hub.hello("lone")
    hub.later(hub.config.dead_after_s + 2.0, silent=tuple(hub.peers.values()))
    fresh, reader = hub.hello("fresh"), hub.hello("reader")
    for peer in (fresh, reader):
        peer.register(b"layout")
    fresh.publish(1, b"one", Published)
    assert reader.answer(reader.join(0), Promise).number == 1


def restarted(promised: tuple[int, int] | None) -> tuple[Hub, Peer, Peer, int, int]:
    """A restarted hub hears of a reader in the middle of version 3 and of its source, which takes it back."""
    hub = Hub(server_epoch=2)
    reader = hub.hello("reader", high=(1, 3))
    reader.register(b"layout")
    source = hub.peer("source")
    placement, sums = source.session + b" placement", b"three"
    held = Held(1, 3, digest(b"layout"), digest(placement), digest(sums), 400, 4)
    source.call(Hello(1, "source", "policy", "source", held=held, high=(1, 3)), Welcome)
    taken = source.unpublish()
    return hub, reader, source, reader.join(0, promised=promised), taken


def test_a_restarted_server_keeps_the_promise_of_its_earlier_life() -> None:
    hub, reader, source, asked, taken = restarted((1, 3))
    hub.later(hub.config.grace_s + 0.5)
    promise = reader.answer(asked, Promise)
    assert (promise.number, promise.sources[0].replica) == (3, "source")
    assert taken not in source.answers, "somebody reads it"
    reader.call(Filling(0), Ok)
    reader.call(Done(0, reader.put(b"three")), Committed)
    source.answer(taken, Ok)


def test_what_is_taken_back_is_promised_to_nobody_new() -> None:
    hub, reader, source, asked, taken = restarted(None)
    hub.later(hub.config.grace_s + 0.5)
    assert reader.answer(asked, Failure).code == "version_unavailable"
    source.answer(taken, Ok)


def test_a_claim_is_heard_only_while_the_server_listens() -> None:
    """Or readers could keep a publisher from its memory for ever, one after the other."""
    hub, reader, source, asked, taken = restarted((1, 3))
    late = hub.hello("late", high=(1, 3))
    late.register(b"layout")
    hub.later(hub.config.grace_s + 0.5)
    reader.answer(asked, Promise)
    wanted = late.join(0, promised=(1, 3))
    assert late.answer(wanted, Failure).code == "version_unavailable"
    assert taken not in source.answers


def test_a_fresh_server_makes_nobody_wait() -> None:
    hub = Hub()
    worker(hub, "trainer").publish(1, b"one", Published)
    reader = worker(hub, "reader")
    assert reader.answer(reader.join(0), Promise).number == 1


def test_a_pause_of_the_server_is_not_the_workers_silence() -> None:
    hub = Hub()
    t, reader = worker(hub, "trainer"), worker(hub, "reader")
    t.publish(1, b"one", Published)
    reader.answer(reader.join(0), Promise)
    hub.now += 100
    t.call(Heartbeat(), Ok)
    hub.later(1.0)
    assert hub.state.leases


@pytest.mark.parametrize("shard", [(0, 0), (1, 1), (-1, 1), (0, 1 << 20)])
def test_impossible_shards_are_refused(shard: tuple[int, int]) -> None:
    hub = Hub()
    hub.peer("bad").refused(Hello(1, "t", "policy", "r", *shard), "config_error")


@pytest.mark.parametrize("names", [("", "r", "t"), ("m", "", "t"), ("m", "r", ""), ("m", "r" * 2000, "t")])
def test_impossible_names_are_refused(names: tuple[str, str, str]) -> None:
    model, replica, token = names
    Hub().peer("bad").refused(Hello(1, token, model, replica), "config_error")


def test_another_protocol_is_refused() -> None:
    Hub().peer("bad").refused(Hello(99, "t", "m", "r"), "protocol_mismatch")


def test_blobs_are_checked_bounded_and_forgotten() -> None:
    hub = Hub(max_blob_bytes=200)
    t = hub.hello("trainer")
    t.refused(PutBlob(b"0" * 16, b"data"), "state_error")
    t.refused(PutBlob(digest(b"x" * 500), b"x" * 500), "registration_error")
    t.refused(Register(b"no such", b"blob", 1, 1), "state_error")
    t.put(b"y" * 150)
    hub.later(61)
    t.refused(GetBlob(digest(b"y" * 150)), "state_error")
    t.put(b"z" * 150)


def test_status_says_who_holds_and_who_reads() -> None:
    hub = Hub()
    t, r = worker(hub, "trainer", zone="us"), worker(hub, "reader")
    t.publish(7, b"seven", Published)
    r.answer(r.join(0), Promise)
    status = t.call(GetStatus(), StatusReply)
    (model,) = status.models
    assert (model.model, model.latest, model.epoch) == ("policy", 7, 1)
    assert [(v.version, v.whole, v.replicas) for v in model.versions] == [(7, True, ("trainer",))]
    reader, trainer = model.replicas
    assert (trainer.state, trainer.version, trainer.zone) == ("published", 7, "us")
    assert (reader.state, reader.version) == ("idle", None)


def test_a_worker_whose_replies_were_lost_says_hello_again() -> None:
    hub = Hub()
    t = worker(hub, "trainer")
    t.publish(3, b"three", Published)
    hub.feed(Disconnected(t.session))
    t.ask(Heartbeat())
    assert t.pushed(UnknownSession)
    t.call(Hello(1, t.session.decode(), "policy", "trainer"), Welcome)
    assert t.publish(3, b"three", Published).number == 3


def test_steady_traffic_does_not_put_off_the_tick() -> None:
    hub = Hub()
    t = worker(hub, "trainer")
    due = hub.state.next_deadline(hub.now)
    hub.now += 0.5
    t.call(Heartbeat(), Ok)
    assert hub.state.next_deadline(hub.now) == due
