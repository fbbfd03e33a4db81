"""Hold the simulator against what was measured in network namespaces (bench/fanout.py): the error of each case."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from bench.common import RESULTS, Row
from bench.sim.assumptions import Assumption, Assumptions, through_the_hub
from bench.sim.fleet import Fleet
from bench.sim.star import star_times

_RATE_BYTES_PER_S = 200e6 / 8
_TOTAL_BYTES = 64 << 20
_GOODPUT = 1448 / 1514
"""Of a full Ethernet frame, the bytes of a TCP segment with timestamps."""
_READERS = (2, 4, 8, 16)
_JOINS = 8
MEASURED = Path(__file__).with_name("fanout_measured.json")
"""What bench/fanout.py measured on a machine with two CPUs, for where it was not run."""


def netns(assumptions: Assumptions) -> Assumptions:
    """Return the parameters of bench/fanout.py; nothing is fitted."""
    why = "bench/fanout.py"
    return replace(
        assumptions,
        nic_bytes_per_s=Assumption(_RATE_BYTES_PER_S, "B/s", why),
        nic_share=Assumption(_GOODPUT, "of the line", "TCP over Ethernet"),
        gpus_per_host=Assumption(1, "readers", why),
        segment_bytes=Assumption(256 << 10, "B", why),
        latency_s=Assumption(0.5e-3, "s", "behind a token bucket whose queue the bytes share; guess"),
    )


def one(assumptions: Assumptions, readers: int, late: int = 0) -> tuple[float, float]:
    """Return when the first `readers` are all done, and the most that the publisher sent, in models."""
    fleet = Fleet(netns(assumptions), _TOTAL_BYTES, 1)
    publisher = fleet.add("publisher")
    replicas = [fleet.add(f"reader{number}") for number in range(readers + late)]
    fleet.connect([publisher, *replicas])
    fleet.publish(publisher, 1)
    now = fleet.events.now
    half_s = _TOTAL_BYTES / (_RATE_BYTES_PER_S * _GOODPUT) / 2
    fleet.update_all(replicas, [now] * readers + [now + half_s] * late)
    done = max(replica.ended_s or 0.0 for replica in replicas[:readers]) - now
    return done, publisher.workers[0].out.carried_bytes / _TOTAL_BYTES


def measured(path: Path) -> dict[str, float]:
    """Return what bench/fanout.py measured, by case."""
    return {row["case"]: row["value"] for row in json.loads(path.read_text())["rows"]}


def compare(assumptions: Assumptions, path: Path | None = None) -> tuple[list[Row], list[dict[str, object]]]:
    """Return figures of the errors, and the pairs themselves; None is what was measured on this machine, if it was."""
    here = RESULTS / "fanout.json"
    path = path or (here if here.exists() else MEASURED)
    real = measured(path)
    if path == MEASURED:  # when followers heard of progress through the hub
        assumptions = through_the_hub(assumptions)
    alone, _ = one(assumptions, 1)
    simulated = {"tcp: 1 reader, time": alone}
    for readers in _READERS:
        seconds, sent = one(assumptions, readers)
        simulated[f"tcp: {readers} readers / 1 reader"] = seconds / alone
        simulated[f"tcp: {readers} readers, sent by the publisher"] = sent
    calm, _ = one(assumptions, _JOINS)
    joined, _ = one(assumptions, _JOINS, late=2)
    simulated[f"tcp: joins half-way: time of the other {_JOINS}"] = joined / calm
    at_once, in_order = star_times(netns(assumptions), _TOTAL_BYTES, _JOINS)
    simulated[f"tcp: star of {_JOINS} raw reads / 1 reader"] = max(at_once) / alone
    simulated[f"tcp: {_JOINS} raw reads in sequence / 1 reader"] = max(in_order) / alone
    rows, pairs = [], []
    for case, value in simulated.items():
        if case not in real:
            continue
        error = 100 * (value / real[case] - 1)
        rows.append(Row(f"calibration: {case}: error", error, "%"))
        pairs.append({"case": case, "measured": real[case], "simulated": value, "error_percent": error})
    return rows, pairs
