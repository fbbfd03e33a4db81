"""Simulated fleets behave as theirs must: one copy takes its time, a star N times that, a chain that and its lag."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from bench.sim.assumptions import SIZES, Assumption, Assumptions, table
from bench.sim.calibrate import MEASURED, compare
from bench.sim.datacentres import datacentres
from bench.sim.elastic import churn
from bench.sim.failures import failures
from bench.sim.fleet import Fleet
from bench.sim.paper import Plan, draw_tree
from bench.sim.standalone import standalone
from bench.sim.star import broadcast_s, star_times

BYTES = 1 << 30
SIZE = replace(SIZES["9B"], parameters=BYTES / 2)


def assume(**values: float) -> Assumptions:
    """Return the assumptions with other values."""
    return replace(Assumptions(), **{name: Assumption(value, "", "a test") for name, value in values.items()})


SLOW = assume(nic_bytes_per_s=100e6, nic_share=1.0, gpus_per_host=1)
ONE_S = BYTES / 100e6


def fan_out(assumptions: Assumptions, readers: int, shards: int = 1) -> tuple[Fleet, list[float]]:
    """Let readers of one publisher ask at the same moment; return their stalls."""
    fleet = Fleet(assumptions, BYTES, shards)
    publisher = fleet.add("publisher")
    replicas = [fleet.add(f"reader-{number}") for number in range(readers)]
    fleet.connect([publisher, *replicas])
    fleet.publish(publisher, 1)
    fleet.update_all(replicas, [fleet.events.now] * readers)
    return fleet, [replica.stall_s for replica in replicas]


def test_one_reader_takes_its_bytes_over_the_rate() -> None:
    fleet, (stall_s,) = fan_out(SLOW, 1)
    assert ONE_S < stall_s < ONE_S + 0.05
    assert sum(w.out.carried_bytes for w in fleet.replicas["publisher"].workers) == pytest.approx(BYTES)


def test_all_shards_of_a_replica_read_at_once() -> None:
    _, (stall_s,) = fan_out(SLOW, 1, shards=4)
    assert ONE_S < stall_s < ONE_S + 0.05


def test_a_star_of_n_takes_n_times_as_long() -> None:
    at_once, in_order = star_times(SLOW, BYTES, 5)
    assert max(at_once) == pytest.approx(5 * ONE_S, rel=0.01)
    assert min(at_once) == pytest.approx(5 * ONE_S, rel=0.01)
    assert in_order == pytest.approx([ONE_S * number for number in range(1, 6)], rel=0.01)


def test_readers_of_one_publisher_take_little_more_than_one() -> None:
    """Each hop lags by what is in flight and by what is not announced yet; the publisher sends about one model."""
    readers = 8
    fleet, stalls = fan_out(SLOW, readers)
    flight_s = SLOW.flight_bytes(100e6) / 100e6
    hop_s = flight_s + SLOW.announce_s.value + 2 * SLOW.poll_s.value + SLOW.segment_bytes.value / 100e6
    assert max(stalls) < ONE_S + readers * (hop_s + 0.01)
    sent = sum(worker.out.carried_bytes for worker in fleet.replicas["publisher"].workers)
    assert sent < 1.5 * BYTES
    received = sum(worker.into.carried_bytes for worker in fleet.workers())
    assert received == pytest.approx(readers * BYTES)
    assert received == pytest.approx(sum(worker.out.carried_bytes for worker in fleet.workers()))


def test_a_follower_lags_by_what_is_in_flight_and_not_announced() -> None:
    one, two = (fan_out(SLOW, count)[1] for count in (1, 2))
    lag_s = max(two) - max(one)
    flight_s = SLOW.flight_bytes(100e6) / 100e6
    assert flight_s <= lag_s
    assert lag_s < flight_s + SLOW.announce_s.value + 2 * SLOW.poll_s.value + SLOW.segment_bytes.value / 100e6 + 0.02


def test_the_same_seed_gives_the_same_fleet_and_another_one_another() -> None:
    one, same, other = (asdict(standalone(SLOW, SIZE, 6, 5.0, seed)) for seed in (1, 1, 2))
    assert one == same
    assert one != other


def test_exactly_one_copy_crosses_between_datacentres() -> None:
    found = datacentres(assume(wan_bytes_per_s=50e9, nic_bytes_per_s=2e9), SIZE, 3)
    assert found.direct_crossed == pytest.approx(1.0, abs=0.05)
    assert found.agent_crossed == pytest.approx(1.0, abs=0.05)
    assert found.agent_s < found.star_s


def test_everybody_gets_the_version_whoever_is_killed() -> None:
    source, hub, seed = failures(assume(nic_bytes_per_s=1e9, wan_bytes_per_s=0.5e9), SIZE, 4)
    assert source.mean_s >= source.calm_mean_s
    assert hub.last_s > hub.calm_last_s
    assert seed.crossed < 2.3


def test_spot_rollouts_that_die_and_come_do_not_stop_the_others() -> None:
    found = churn(assume(nic_bytes_per_s=1e9), SIZE, 2, 4, 0.5, versions=2)
    assert found.killed == 4
    assert found.ours_s < found.star_s


def test_a_broadcast_takes_one_copy_and_the_way_to_the_last_rank() -> None:
    a = Assumptions()
    line = a.nic_bytes_per_s.value * a.nccl_share.value
    assert BYTES / line < broadcast_s(a, BYTES, 1000) < BYTES / line + 0.01


def test_the_simulator_gives_what_was_measured_in_namespaces() -> None:
    """Of up to four readers: there the processors of the machine on which it was measured were not the limit."""
    errors = {pair["case"]: pair["error_percent"] for pair in compare(Assumptions(), MEASURED)[1]}
    for case in ("tcp: 1 reader, time", "tcp: 2 readers / 1 reader", "tcp: 4 readers / 1 reader"):
        assert abs(float(str(errors[case]))) < 5, case


def test_every_assumption_says_where_it_is_from() -> None:
    text = table(Assumptions())
    assert all(f"`{name}`" in text for name in Assumptions.__dataclass_fields__)
    assert all(getattr(Assumptions(), name).why for name in Assumptions.__dataclass_fields__)


def test_a_figure_is_written_with_its_data(tmp_path: Path) -> None:
    rows, figure = draw_tree(Plan(assume(nic_bytes_per_s=1e9), quick=True))
    data = json.loads(figure.write(tmp_path).read_text())
    assert [edge["name"] for edge in data["edges"] if edge["wan"]] == ["remote-0"]
    readers = {f"remote-{number}" for number in range(6)} | {f"rollout-{number}" for number in range(8)}
    assert {edge["name"] for edge in data["edges"]} == readers
    assert all(row.ok for row in rows)
