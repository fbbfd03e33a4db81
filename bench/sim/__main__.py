"""Simulate the paper's workloads with the real machines, and draw the figures.

    python -m bench.sim [--figure NAME] [--workers N] [--seed S] [--quick] [--json FILE] [--assumptions]

Everything runs on a virtual clock and one seed: the same arguments give the same figures on any machine.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from bench.common import Row, parser_of, report, skipped
from bench.sim.assumptions import Assumptions, table
from bench.sim.calibrate import compare
from bench.sim.paper import FIGURES, Plan
from bench.sim.plots import FOLDER

NAME = "sim"
_TITLE = "# What the simulator assumes (written by `python -m bench.sim`)"


def arguments_of() -> argparse.Namespace:
    """Read the options."""
    parser = parser_of(NAME, __doc__)
    parser.add_argument(
        "--figure", action="append", choices=[*FIGURES, "calibration"], help="only this one (again: these)"
    )
    parser.add_argument("--workers", type=int, default=1024, help="GPUs of the standalone fleet, and most readers")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--quick", action="store_true", help="small fleets: seconds instead of minutes")
    parser.add_argument("--figures", type=Path, default=FOLDER, metavar="FOLDER", help="where figures are written")
    parser.add_argument("--no-draw", action="store_true", help="write the data of the figures, but no PNG")
    parser.add_argument("--assumptions", action="store_true", help="print the table of assumptions and end")
    return parser.parse_args()


def main() -> int:
    """Simulate, print, write, draw."""
    arguments, assumptions = arguments_of(), Assumptions()
    if arguments.assumptions:
        print(table(assumptions))
        return 0
    workers = min(arguments.workers, 128) if arguments.quick else arguments.workers
    plan = Plan(assumptions, workers, workers, arguments.seed, arguments.quick)
    wanted = arguments.figure or [*FIGURES, "calibration"]
    rows: list[Row] = []
    drawn = []
    for name in wanted:
        begun_s = time.monotonic()
        if name == "calibration":
            rows += compare(assumptions)[0]
        else:
            more, figure = FIGURES[name](plan)
            rows += more
            drawn.append(figure.write(arguments.figures))
        print(f"{NAME}: {name} took {time.monotonic() - begun_s:.1f} s", file=sys.stderr, flush=True)
    arguments.figures.mkdir(parents=True, exist_ok=True)
    (arguments.figures / "assumptions.md").write_text(f"{_TITLE}\n\n{table(assumptions)}\n", encoding="utf-8")
    report(NAME, arguments, rows)
    if not arguments.no_draw and drawn:
        try:
            from bench.figures import draw
        except ImportError as error:
            skipped(NAME, "drawing", str(error))
        else:
            for path in drawn:
                draw(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
