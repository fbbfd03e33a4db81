"""What the status says of who reads from whom: places, several sources, what is being filled, who waits."""

from __future__ import annotations

from tensorhub_core.state.messages import (
    Announce,
    Filling,
    FillStatus,
    GetStatus,
    Ok,
    PlaceStatus,
    ReplicaStatus,
    SourceStatus,
    StatusReply,
)
from tests.sim.hub import Hub
from tests.unit.state.fleet import begin, commit, join, promised, publish, replica, replicate

WEST = PlaceStatus("west", "w0", "mlx5_0")
EAST = PlaceStatus("east", "e0")
AT_WEST = {"zone": "west", "host": "w0", "rail": "mlx5_0"}
AT_EAST = {"zone": "east", "host": "e0"}


def status(hub: Hub) -> dict[str, ReplicaStatus]:
    (model,) = hub.hello("watch", observer=True).call(GetStatus(), StatusReply).models
    return {row.replica: row for row in model.replicas}


def test_a_reader_across_zones() -> None:
    hub = Hub()
    trainer, reader = replica(hub, "trainer", 2, **AT_WEST), replica(hub, "reader", 2, **AT_EAST)
    publish(trainer, 1)
    assert promised(reader, join(reader, 0)) == 1
    first = status(hub)["reader"].shards[0]
    assert (first.place, first.fills) == (EAST, FillStatus(1, False, 0, 400))
    assert first.sources == (SourceStatus("trainer", 0, WEST, wan=True),)
    begin(reader, 0)
    hub.now += 2
    reader[0].call(Announce(0, 2, 200), Ok)
    first, second = status(hub)["reader"].shards
    assert first.fills == FillStatus(1, True, 200, 400, 100.0)
    assert (first.source, first.version, first.state, first.bytes_per_s) == ("trainer", 1, "filling", 100.0)
    assert (second.fills, second.sources[0].shard) == (FillStatus(1, True, 0, 400), 1)
    commit(reader, 0, 1)
    assert [(shard.fills, shard.sources) for shard in status(hub)["reader"].shards] == [(None, ())] * 2


def test_several_sources_and_what_is_staged() -> None:
    hub = Hub()
    trainer = replica(hub, "trainer", **AT_WEST)
    publish(trainer, 1)
    near = replica(hub, "near", **AT_EAST)
    assert replicate(near) == 1
    (reader,) = replica(hub, "reader", **AT_EAST)
    for number, name in enumerate(("other", "third")):
        assert replicate(replica(hub, name, **AT_EAST)) == 1, number
    asked = reader.join(0, mode="stage")
    assert promised([reader], [asked]) == 1
    reader.call(Filling(0), Ok)
    row = status(hub)["reader"].shards[0]
    assert row.fills == FillStatus(1, True, 0, 400, staged=True)
    assert [(source.replica, source.wan) for source in row.sources] == [(n, False) for n in ("near", "other", "third")]
    assert row.version is None


def test_who_waits_for_what() -> None:
    hub = Hub()
    (waits,), (wants,) = replica(hub, "waits"), replica(hub, "wants")
    replica(hub, "idle")
    waits.join(0)
    wants.join(0, 7)
    rows = status(hub)
    assert [rows[name].waits_for for name in ("waits", "wants", "idle")] == ["latest", "7", None]


def test_who_puts_off_to_begin_is_late() -> None:
    hub = Hub(worth_waiting_bytes=0)
    trainer, slow = replica(hub, "trainer"), replica(hub, "slow")
    publish(trainer, 1)
    assert promised(slow, join(slow, 0)) == 1
    row = status(hub)["slow"]
    assert (row.waits_for, row.shards[0].fills) == (None, FillStatus(1, False, 0, 400))
    hub.later(hub.config.begin_within_s + 0.5)
    assert status(hub)["slow"].shards[0].fills == FillStatus(1, False, 0, 400, late=True)


def test_a_seed_agent_is_shown_as_one() -> None:
    hub = Hub()
    for seeds in (False, True):
        replica(hub, f"seeds {seeds}", zone="east", seeds=seeds)
    assert {name: row.seeds for name, row in status(hub).items()} == {"seeds False": False, "seeds True": True}
