"""Run every bench, one after the other, and print one table; the figures go to bench/results/ as JSON.

    python bench/run.py [NAME ...]

A bench is a script beside this one that takes `--json FILE` (see common.py). Exits with 1 if one failed; goals that
are missed are named. The stall of a swap is taken from what the last demo wrote, if there is one: `make demo` measures
it.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from dataclasses import asdict
from datetime import datetime, timezone
from pathlib import Path

from common import RESULTS, Row, machine, show

HERE = Path(__file__).resolve().parent
BENCHES = (
    "peers",
    "fanout",
    "hops",
    "failover",
    "replicate_rate",
    "publish_latency",
    "unpublish_latency",
    "planning",
    "reshard",
    "reshard_plans",
    "memory_server",
    "control_plane",
    "many_workers",
    "growth",
    "install",
    "stall",
)
TIMEOUT_S = 1800.0


def run(name: str) -> tuple[list[Row], bool]:
    """Run one bench; returns its rows and whether it ended well."""
    file = RESULTS / f"{name}.json"
    file.unlink(missing_ok=True)
    print(f"--- {name}", flush=True)
    command = [sys.executable, str(HERE / f"{name}.py"), "--json", str(file)]
    try:
        code = subprocess.run(command, timeout=TIMEOUT_S, check=False).returncode
    except subprocess.TimeoutExpired:
        print(f"{name} did not end within {TIMEOUT_S:g} s", file=sys.stderr)
        code = 1
    rows = [Row(**row) for row in json.loads(file.read_text())["rows"]] if file.exists() else []
    return rows, code == 0


def main() -> int:
    """Run the benches that were named, or all."""
    parser = argparse.ArgumentParser(description="Run the benches and print one table.")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"one of {', '.join(BENCHES)}; default: all")
    names = parser.parse_args().names or [name for name in BENCHES if (HERE / f"{name}.py").exists()]
    unknown = sorted(set(names) - set(BENCHES))
    if unknown:
        parser.error(f"no bench is called {unknown[0]!r}")
    RESULTS.mkdir(exist_ok=True)
    rows: list[tuple[str, Row]] = []
    failed = []
    for name in names:
        found, well = run(name)
        rows += [(name, row) for row in found]
        if not well:
            failed.append(name)
    print()
    show(rows)
    document = {
        "taken": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "machine": machine(),
        "rows": [{"bench": name, **asdict(row)} for name, row in rows],
    }
    (RESULTS / "all.json").write_text(json.dumps(document, indent=2) + "\n")
    print(f"\nwritten to {(RESULTS / 'all.json').relative_to(HERE.parent)}")
    missed = [f"{name}: {row.case}" for name, row in rows if row.ok is False]
    if missed:
        print(f"goals missed: {'; '.join(missed)}")
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
