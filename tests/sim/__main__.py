"""Run simulated worlds by seed: `python -m tests.sim --seeds 300`, or one: `python -m tests.sim --seed 17 --trace`."""

from __future__ import annotations

import argparse
import sys
import time

from tests.sim.many import Show, Total, run_all


def main() -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(prog="python -m tests.sim", description=__doc__)
    parser.add_argument("--seeds", type=int, default=300, help="how many worlds to run")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--seed", type=int, help="run this one only")
    parser.add_argument("--trace", action="store_true", help="print every message and call")
    parser.add_argument("--hash", action="store_true", help="print the hash of each world's trace")
    parser.add_argument("--agents", action="store_true", help="run worlds with seed agents")
    parser.add_argument("--jobs", type=int, default=1, help="how many processes share the work")
    parser.add_argument("--keep-going", action="store_true", help="run the other seeds too when one fails")
    options = parser.parse_args()
    seeds = [options.seed] if options.seed is not None else range(options.first, options.first + options.seeds)
    began, total = time.monotonic(), Total()
    for part in run_all(seeds, Show(options.trace, options.hash, options.agents), options.jobs):
        total.add(part)
        for line in part.lines:
            print(line, flush=True)
        if total.failed and not options.keep_going:
            break
    print(f"{time.monotonic() - began:.1f} s: {total}")
    return int(total.failed > 0)


if __name__ == "__main__":
    sys.exit(main())
