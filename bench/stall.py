"""How long an engine does not answer while its weights are swapped, in parts; from what the last demos wrote.

    python bench/stall.py [--json FILE]

A demo runs two real vLLM engines that follow an RL loop and leaves its figures in bench/results/demo-NAME.json: run
`make demo` or `make demo-quick` first. Engines share two cores with the trainer there, so compare the parts.
"""

from __future__ import annotations

import json
import statistics
import sys
from pathlib import Path

from common import RESULTS, Row, main

PARTS = ("drain_s", "transfer_s", "process_s", "total_s")


def swaps(file: Path) -> list[dict[str, float]]:
    """Return the engines' reports on swaps, without the first fills, which no request waits for."""
    reports = (report for step in json.loads(file.read_text())["steps"] for report in step["engines"].values())
    return [report for report in reports if report["total_s"]]


def measure() -> list[Row]:
    """Read the demos' records; swaps that were staged are told apart from those that were not."""
    rows = []
    for file in sorted(RESULTS.glob("demo-*.json")):
        reports = swaps(file)
        staged = [report for report in reports if report.get("stage_s")]
        plain = [report for report in reports if not report.get("stage_s")]
        rows += [*figures(file.stem, plain), *figures(f"{file.stem}, staged", staged)]
    if not rows:
        print("no demo has been run here: `make demo` measures the stall of a swap", file=sys.stderr)
    return rows


def figures(name: str, found: list[dict[str, float]]) -> list[Row]:
    """Return the medians of some swaps and the worst of them."""
    rows = []
    if found:
        size = max(report["total_bytes"] for report in found) / 1e6
        rows.append(Row(f"{name}: swaps measured", len(found), f"of {size:,.1f} MB"))
        for part in PARTS:
            seconds = [report[part] for report in found]
            rows.append(Row(f"{name}: {part.removesuffix('_s')}, median", statistics.median(seconds) * 1e3, "ms"))
        rows.append(Row(f"{name}: total, worst", max(report["total_s"] for report in found) * 1e3, "ms"))
    return rows


if __name__ == "__main__":
    main("stall", measure)
