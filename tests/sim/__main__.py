"""Run simulated worlds by seed: `python -m tests.sim --seeds 300`, or one: `python -m tests.sim --seed 17 --trace`."""

from __future__ import annotations

import argparse
import collections
import gc
import sys
import time
import traceback

from tests.sim.run import Result, simulate
from tests.sim.scenario import draw


def main() -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(prog="python -m tests.sim", description=__doc__)
    parser.add_argument("--seeds", type=int, default=300, help="how many worlds to run")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--seed", type=int, help="run this one only")
    parser.add_argument("--trace", action="store_true", help="print every message and call")
    parser.add_argument("--hash", action="store_true", help="print the hash of each world's trace")
    parser.add_argument("--keep-going", action="store_true", help="run the other seeds too when one fails")
    options = parser.parse_args()
    seeds = [options.seed] if options.seed is not None else range(options.first, options.first + options.seeds)
    failed, began = 0, time.monotonic()
    calls: collections.Counter[str] = collections.Counter()
    heard: collections.Counter[str] = collections.Counter()
    for count, seed in enumerate(seeds):
        result = simulate(draw(seed), options.trace or options.hash)
        calls.update(result.calls)
        heard.update(result.failures)
        show(result, options)
        failed += result.error is not None
        if failed and not options.keep_going:
            break
        if count % 8 == 7:
            gc.collect()
    took_s = time.monotonic() - began
    print(f"{count + 1} worlds, {failed} failed, {took_s:.1f} s; calls {dict(calls)}; refused {dict(heard)}")
    return int(failed > 0)


def show(result: Result, options: argparse.Namespace) -> None:
    """Print what is to be seen of one world."""
    if options.trace:
        print("\n".join(result.lines))
    if options.hash:
        print(f"{result.scenario.seed} {result.trace_hash}")
    if result.error is not None:
        seed = result.scenario.seed
        print(f"seed {seed}: {type(result.error).__name__}: {result.error}", file=sys.stderr)
        where = traceback.extract_tb(result.error.__traceback__)[-1]
        print(f"  raised at {where.filename}:{where.lineno}; {result.scenario}", file=sys.stderr)
        print(f"  replay: python -m tests.sim --seed {seed} --trace", file=sys.stderr)
        if options.trace:
            traceback.print_exception(result.error)


if __name__ == "__main__":
    sys.exit(main())
