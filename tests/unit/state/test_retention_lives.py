"""What is retained over leaving, dying, restarting, and being watched (laws L5, L7, L11)."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tensorhub_core.state.messages import (
    DescribeVersion,
    DropOffload,
    GetStatus,
    HandOver,
    Held,
    Hello,
    JoinRound,
    Leave,
    LeaveRound,
    ModelStatus,
    Offload,
    Ok,
    Published,
    StatusReply,
    VersionLayouts,
    Welcome,
)
from tests.sim.hub import Hub, Peer, digest
from tests.unit.state.fleet import (
    SIZE,
    answered,
    begin,
    commit,
    dropped,
    join,
    lawful,
    offload,
    offloads_asked,
    promised,
    publish,
    replica,
    replicate,
    rows,
    source_of,
    sums,
    unpublish,
)


def status(peer: Peer) -> ModelStatus:
    (model,) = peer.call(GetStatus("policy"), StatusReply).models
    return model


def losses(hub: Hub) -> list[str]:
    return [line for line in hub.logs if "has lost its last" in line]


# --- leaving --------------------------------------------------------------------------------------------------------


def test_who_leaves_is_let_go_as_soon_as_another_has_the_version() -> None:
    hub = Hub(retain=1)
    t, (r,) = replica(hub, "trainer", 2), replica(hub, "r")
    publish(t, 1)
    leaving = [p.ask(HandOver()) for p in t]
    assert answered(t, leaving) == [False, False], "r might take it over"
    assert r.pushes == []
    other = replica(hub, "other", 2)
    promised(other, join(other, 0))
    begin(other, 0)
    commit(other, 0, 1)
    assert answered(t, leaving) == [True, True]
    for p in t:
        p.call(Leave(), Ok)
    assert losses(hub) == []
    lawful(hub)


def test_who_leaves_with_nothing_that_depends_on_it_is_let_go_at_once() -> None:
    hub = Hub(retain=1)
    (t,), (r,), (s,) = replica(hub, "trainer"), replica(hub, "r"), replica(hub, "spot", spot=True)
    s.call(HandOver(), Ok)
    publish([t], 1)
    replicate([r])
    t.call(HandOver(), Ok)
    assert "version 1 " in r.refused(HandOver(), "version_unavailable").message, "nobody could take it over"
    assert Hub().hello("off").call(HandOver(), Ok)


@pytest.mark.parametrize("drains", [False, True])
def test_who_leaves_without_waiting_counts_as_a_failure(drains: bool) -> None:
    hub = Hub(retain=1)
    (t,) = replica(hub, "trainer")
    publish([t], 1)
    t.refused(HandOver(), "version_unavailable")
    if drains:
        assert answered([t], unpublish([t])) == [True], "no offload copy would outlive it"
        assert offloads_asked(t) == []
    t.call(Leave(), Ok)
    (loss,) = losses(hub)
    assert "version 1 " in loss
    assert "'trainer'" in loss
    lawful(hub)
    (late,) = replica(hub, "late")
    late.refused(JoinRound(0, None), "version_unavailable")


def test_who_is_asked_to_keep_a_version_and_then_leaves_is_not_held_back() -> None:
    hub = Hub(retain=1)
    (t,) = replica(hub, "trainer")
    publish([t], 1)
    asked = unpublish([t])
    (push,) = t.pushed(Offload)
    t.ask(HandOver())
    assert answered([t], asked) == [True]
    assert dropped(t) == [push.copy]
    assert len(losses(hub)) == 1
    lawful(hub)


def test_who_leaves_does_not_free_others() -> None:
    hub = Hub(retain=1)
    (t,), (r,) = replica(hub, "trainer"), replica(hub, "r")
    publish([t], 1)
    replicate([r])
    t.call(HandOver(), Ok)
    unpublish([r])
    assert offloads_asked(r) == [1]
    lawful(hub)


def test_offload_copies_are_handed_over_as_well() -> None:
    hub = Hub(retain=1)
    (t,), (r,) = replica(hub, "trainer"), replica(hub, "r")
    publish([t], 1)
    unpublish([t])
    offload(t)
    leaving = t.ask(HandOver())
    assert leaving not in t.answers
    assert dropped(t) == []
    replicate([r])
    assert answered([t], [leaving]) == [True]
    lawful(hub)


# --- dying ----------------------------------------------------------------------------------------------------------


def test_only_a_failure_loses_a_version_and_then_its_readers_are_told_at_once() -> None:
    hub = Hub(retain=1)
    (t,), (r,) = replica(hub, "trainer"), replica(hub, "r")
    publish([t], 1)
    unpublish([t])
    offload(t)
    promised([r], join([r], 0))
    begin([r], 0)
    hub.later(20, silent=(t,))
    assert len(losses(hub)) == 1
    (late,) = replica(hub, "late")
    late.refused(JoinRound(0, 1), "version_unavailable")
    lawful(hub)


def test_a_shard_that_dies_takes_the_version_with_it() -> None:
    hub = Hub(retain=1)
    t = replica(hub, "trainer", 2)
    publish(t, 1)
    asked = unpublish(t)
    offload(t[0])
    (again,) = [hub.hello("trainer", 1, 2)]
    assert len(losses(hub)) == 1
    assert again.answers
    assert answered(t[:1], asked[:1]) == [True]
    lawful(hub)


def test_an_offload_copy_that_is_withdrawn_serves_on_when_it_is_needed_again() -> None:
    hub = Hub(retain=1)
    (t,), (r,), (slow,) = replica(hub, "trainer"), replica(hub, "r"), replica(hub, "slow", spot=True)
    publish([t], 1)
    unpublish([t])
    offload(t)
    promised([slow], join([slow], 0))
    begin([slow], 0)
    replicate([r])
    assert rows(t)[1][2] == ["r"]
    assert dropped(t) == [], "it is still read"
    hub.later(20, silent=(r,))
    assert rows(t)[1] == (True, True, ["trainer"])
    commit([slow], 0, 1)
    assert dropped(t) == []
    assert losses(hub) == []
    lawful(hub)


def test_who_asks_while_the_copy_is_made_waits_for_it() -> None:
    hub = Hub(retain=1)
    (t,), (r,) = replica(hub, "trainer"), replica(hub, "r")
    publish([t], 1)
    unpublish([t])
    waiting = r.join(0)
    waiting_for_it = r.wait()
    assert waiting not in r.answers
    assert waiting_for_it not in r.answers
    (layout,) = r.call(DescribeVersion(), VersionLayouts).layouts
    assert layout.replica == "trainer"
    offload(t)
    assert source_of(r, waiting) == "trainer"
    assert waiting_for_it in r.answers
    r.ask(LeaveRound(0, "deadline_exceeded", "no time"))
    lawful(hub)


# --- restarts -------------------------------------------------------------------------------------------------------


def held(number: int, placement: bytes, shard: int = 0, bytes_of: int = 0) -> Held:
    """Say what a shard holds."""
    return Held(1, number, digest(b"layout %d" % shard), placement, digest(sums(number, bytes_of or shard)), SIZE, 4)


def back(hub: Hub, name: str, shard: int = 0, num_shards: int = 1, **about: object) -> Peer:
    """Come back after the server restarted, with all blobs."""
    peer = hub.hello(name, shard, num_shards, **about)
    for blob in (b"layout %d" % shard, b"offload", *(sums(number, shard) for number in (1, 2))):
        peer.put(blob)
    return peer


def restarted(**config: float) -> Hub:
    return Hub(server_epoch=2, grace_s=5.0, **config)


def test_offload_copies_come_back_after_a_restart_and_serve() -> None:
    hub = restarted(retain=1)
    t = [back(hub, "trainer", k, 2, offloads=(held(1, digest(b"offload"), k),)) for k in range(2)]
    late = replica(hub, "late", 2)
    asked = join(late, 0)
    assert late[0].answers.get(asked[0]) is None, "the server listens first"
    hub.later(6)
    assert {source_of(p, n) for p, n in zip(late, asked, strict=True)} == {"trainer"}
    assert dropped(*t) == []
    begin(late, 0)
    commit(late, 0, 1)
    assert [push.placement for p in t for push in p.pushed(DropOffload)] == [digest(b"offload")] * 2
    lawful(hub)


def test_no_verdict_is_taken_while_the_server_listens() -> None:
    hub = restarted(retain=1)
    t = back(hub, "trainer", held=held(2, digest(b"placement")), offloads=(held(1, digest(b"offload")),))
    (asked,) = unpublish([t])
    assert offloads_asked(t) == []
    assert dropped(t) == []
    r = back(hub, "r", held=held(2, digest(b"placement")))
    hub.later(6)
    assert offloads_asked(t) == []
    assert answered([t], [asked]) == [True], "r has it as well"
    assert len(dropped(t)) == 1, "2 is safe"
    assert r.pushes == []
    lawful(hub)


def test_after_listening_the_last_holder_is_asked() -> None:
    hub = restarted(retain=1)
    t = back(hub, "trainer", held=held(2, digest(b"placement")))
    (asked,) = unpublish([t])
    hub.later(6)
    assert offloads_asked(t) == [2]
    offload(t)
    assert answered([t], [asked]) == [True]
    lawful(hub)


def test_what_a_worker_does_not_have_any_more_is_forgotten_and_the_rest_taken_once() -> None:
    hub = Hub(retain=2)
    (t,) = replica(hub, "trainer")
    for number in (1, 2):
        publish([t], number)
        unpublish([t])
        offload(t)
    placements = [digest(b"offload %d of %s" % (number, t.session)) for number in (1, 2)]
    hello = Hello(1, t.session.decode(), "policy", "trainer", offloads=(held(2, placements[1]),))
    t.call(hello, Welcome)
    assert set(rows(t)) == {2}
    assert "version 1 " in losses(hub)[0], "the worker has lost it, no call"
    t.call(replace_offloads(hello, (held(2, placements[1]), held(1, placements[0]))), Welcome)
    assert set(rows(t)) == {1, 2}
    assert status(t).offload.bytes == 2 * SIZE
    elsewhere = held(2, digest(b"elsewhere"))
    t.call(replace_offloads(hello, (elsewhere, held(1, placements[0]))), Welcome)
    assert rows(t)[2] == (True, True, ["trainer"]), "a copy that lies elsewhere now is another copy"
    lawful(hub)


def replace_offloads(hello: Hello, offloads: tuple[Held, ...]) -> Hello:
    return Hello(1, hello.token, hello.model, hello.replica, offloads=offloads)


def test_other_bytes_are_not_taken_back() -> None:
    hub = Hub(retain=1)
    (t,) = replica(hub, "trainer")
    publish([t], 1)
    liar = back(hub, "liar", offloads=(held(1, digest(b"offload"), 0, 1),))
    assert rows(liar)[1][2] == ["trainer"]
    assert any("other bytes" in line for line in hub.logs)
    lawful(hub)


def test_without_retention_what_comes_back_is_freed() -> None:
    hub = restarted(retain=0)
    t = back(hub, "trainer", offloads=(held(1, digest(b"offload")),))
    hub.later(6)
    assert [push.placement for push in t.pushed(DropOffload)] == [digest(b"offload")]
    lawful(hub)


# --- what people see ------------------------------------------------------------------------------------------------


def test_each_model_has_its_own_number() -> None:
    hub = Hub(retain=1)
    hub.state.config = replace(hub.config, retain_models=(("critic", 0),))
    (t,) = replica(hub, "trainer", model="critic")
    publish([t], 1)
    assert answered([t], unpublish([t])) == [True]
    assert offloads_asked(t) == []


def test_status_tells_what_is_offloaded_and_how_long_drains_took() -> None:
    hub = Hub(retain=1)
    (t,), (r,) = replica(hub, "trainer"), replica(hub, "r", spot=True)
    publish([t], 1)
    promised([r], join([r], 0))
    begin([r], 0)
    unpublish([t])
    assert status(t).drain.count == 0
    hub.later(3)
    offload(t)
    commit([r], 0, 1)
    model = status(t)
    assert (model.drain.count, model.drain.total_s, model.drain.max_s) == (1, 3.0, 3.0)
    assert (model.offload.made, model.offload.dropped, model.offload.bytes) == (1, 0, SIZE)
    shown = {replica.replica: (replica.state, replica.version) for replica in model.replicas}
    assert shown == {"trainer": ("offload", 1), "r": ("published", 1)}
    publish([t], 2)
    hub.later(1)
    unpublish([r])
    model = status(t)
    assert (model.drain.count, model.drain.total_s, model.drain.max_s) == (2, 3.0, 3.0)
    assert (model.offload.made, model.offload.dropped, model.offload.bytes) == (1, 1, 0)
    assert [(row.version, row.retained) for row in model.versions] == [(2, True)]


def test_a_replica_that_has_all_of_it_again_decides_again() -> None:
    hub = Hub(retain=1)
    t = replica(hub, "trainer", 2)
    (slow,) = [replica(hub, "slow", 2, spot=True)]
    publish(t, 1)
    promised(slow, join(slow, 0))
    begin(slow, 0)
    unpublish(t[:1])
    offload(t[0])
    again = hub.hello("trainer", 1, 2)
    assert len(losses(hub)) == 1
    again.register(b"layout 1")
    again.publish(1, sums(1, 1), Published)
    assert rows(again)[1] == (True, True, ["trainer"])
    asked = unpublish([again])
    assert offloads_asked(again) == [1], "shard 0 may have let go when shard 1 was lost, but it has its offload copy"
    offload(again)
    slow[1].ask(LeaveRound(0, "deadline_exceeded", "no time"))
    assert answered([again], asked) == [True]
    assert rows(again)[1] == (True, True, ["trainer"])
    lawful(hub)
