"""Leave a run's figures as JSON, for the benches' table of stalls."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from demo.proof import Check, Step

RESULTS = Path(__file__).resolve().parent.parent / "bench" / "results"


def write_record(name: str, steps: Sequence[Step], checks: Sequence[Check]) -> Path:
    """Write `demo-NAME.json`: a row per version with its reward and what every engine's swap cost."""
    rows = [
        {
            "version": step.version,
            "reward": step.reward,
            "words": step.words,
            "completions": len(step.answers),
            "engines": {replica: asdict(report) for replica, report in step.reports.items()},
        }
        for step in steps
    ]
    return write_rows(name, rows, checks)


def write_rows(name: str, rows: Sequence[Mapping[str, object]], checks: Sequence[Check]) -> Path:
    """Write `demo-NAME.json`: a row per version, and the checks."""
    RESULTS.mkdir(parents=True, exist_ok=True)
    file = RESULTS / f"demo-{name}.json"
    file.write_text(json.dumps({"steps": list(rows), "checks": [asdict(check) for check in checks]}, indent=1))
    return file
