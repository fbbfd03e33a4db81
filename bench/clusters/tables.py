"""What the figures of one update become: rows of a table, beside the physical bound and beside ours."""

from __future__ import annotations

from dataclasses import dataclass

from bench.clusters.crew import Outcome
from bench.common import Row

_MBIT = 125_000.0


@dataclass(frozen=True)
class Bound:
    """What no way can beat: all bytes over the slowest link that they must cross, once."""

    total_bytes: int
    rate_mbit: float

    @property
    def copy_s(self) -> float:
        """Return the seconds of one copy over that link."""
        return self.total_bytes / (self.rate_mbit * _MBIT)


def rows_of(workload: str, way: str, outcome: Outcome, bound: Bound, ours: Outcome | None = None) -> list[Row]:
    """Return the rows of one way; with `ours`, how often our stall its stall is."""
    label = f"{workload}: {way}"
    rows = [
        Row(f"{label}, stall of all", outcome.stall_s, "s"),
        Row(f"{label}, stall of the rollouts", outcome.rollouts_s, "s"),
        Row(f"{label}, trainer waits", outcome.trainer_s, "s"),
        Row(f"{label}, until the last has it / bound", outcome.seconds / bound.copy_s, "x"),
        Row(f"{label}, sent by the trainer's link", outcome.sent_bytes / bound.total_bytes, "models"),
        Row(f"{label}, CPUs busy", 100 * outcome.busy, "%"),
    ]
    if ours is not None and ours.stall_s > 0:
        rows.insert(1, Row(f"{label}, stall / stall of ours", outcome.stall_s / ours.stall_s, "x"))
    return rows
