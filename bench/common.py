"""What all bench scripts share: how a figure is written down, and a hub to measure against.

A script measures, prints its table and, with `--json FILE`, writes `{"bench", "machine", "rows"}`. Every row is one
figure with its unit; `goal` says what it is held to and `ok` whether it is met (None = no goal).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

START_TIMEOUT_S = 30.0
RESULTS = Path(__file__).resolve().parent / "results"


@dataclass(frozen=True)
class Row:
    """One figure."""

    case: str
    value: float
    unit: str
    goal: str = ""
    ok: bool | None = None


def limit(case: str, value: float, unit: str, most: float) -> Row:
    """Return a figure that must not be above `most`."""
    return Row(case, value, unit, f"<= {most:g}", value <= most)


def at_least(case: str, value: float, unit: str, least: float) -> Row:
    """Return a figure that must not be below `least`."""
    return Row(case, value, unit, f">= {least:g}", value >= least)


def skipped(bench: str, case: str, why: str) -> None:
    """Say that a case could not be measured here."""
    print(f"{bench}: {case} skipped: {why}", file=sys.stderr, flush=True)


def parser_of(name: str, text: str | None = None) -> argparse.ArgumentParser:
    """Return a parser of the options that all scripts have."""
    parser = argparse.ArgumentParser(
        prog=f"bench/{name}.py", description=text, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures to FILE")
    return parser


def main(name: str, measure: Callable[[], Sequence[Row]]) -> None:
    """Run a script without options of its own: measure, print, write."""
    report(name, parser_of(name).parse_args(), measure())


def report(name: str, arguments: argparse.Namespace, rows: Sequence[Row]) -> None:
    """Print and write figures; a goal that is missed is shown, not failed: machines are noisy."""
    rows = list(rows)
    show([(name, row) for row in rows])
    if arguments.json is not None:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        document = {"bench": name, "machine": machine(), "rows": [asdict(row) for row in rows]}
        arguments.json.write_text(json.dumps(document, indent=2) + "\n")


def machine() -> dict[str, object]:
    """Say on what the figures were taken."""
    return {"python": platform.python_version(), "system": platform.platform(), "cpus": len(os.sched_getaffinity(0))}


def show(rows: Sequence[tuple[str, Row]]) -> None:
    """Print one table."""
    table = Table("bench", "case", "value", "unit", "goal", "met", box=None, header_style="bold", pad_edge=False)
    table.columns[2].justify = "right"
    for name, row in rows:
        met = {True: "[green]yes", False: "[red]no", None: ""}[row.ok]
        table.add_row(
            name, row.case, f"{row.value:,.3g}" if row.value < 1000 else f"{row.value:,.0f}", row.unit, row.goal, met
        )
    Console().print(table)


@contextlib.contextmanager
def hub(*options: str, prefix: Sequence[str] = (), bind: str = "tcp://127.0.0.1:0") -> Iterator[tuple[str, int]]:
    """Run `tensorhub serve` as a process of its own, behind `prefix`; yields its address and process id."""
    command = [*prefix, sys.executable, "-m", "tensorhub_core.cli.main", "serve", "--bind", bind, *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline().strip()
            if not line.startswith("listening on "):
                raise RuntimeError(f"the hub did not start: {line!r}")
            yield line.removeprefix("listening on "), process.pid
        finally:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(START_TIMEOUT_S)
            process.kill()


def hub_on(command: Sequence[str], address: str) -> contextlib.AbstractContextManager[tuple[str, int]]:
    """Run a hub that keeps no copies on another host, behind its `command`; yields its address and process id."""
    return hub("--log-level", "warning", "--retain", "0", prefix=command, bind=f"tcp://{address}:7077")
