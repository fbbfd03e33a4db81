"""The paper's three workloads on small clusters of real processes, ours beside a star and beside collectives.

    python bench/clusters/run.py [--workload NAME ...] [--quick] [--json FILE]     (root: it makes network namespaces)

Hosts are network namespaces behind links of one rate, zones are joined by links that are slower and longer. A *star*
is every rollout reading from the trainer by itself, over our raw TCP transport or NIXL/UCX; a *collective* is
torch.distributed over gloo: its broadcast in the size of pieces that is best, and a ring as NCCL makes one. The
stall of a rollout runs from its pause until it has the new weights; that of the trainer from when it wants to change
its weights until it may. Without `--workload` all are run, in about four minutes, and with `--json` written.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from bench.clusters import datacentres, elastic, links, standalone
from bench.common import Row, parser_of, report, skipped
from bench.netns import why_unavailable

NAME = "clusters"
WORKLOADS = {
    links.NAME: links.measure,
    standalone.NAME: standalone.measure,
    standalone.SPREAD: standalone.measure_spread,
    elastic.NAME: elastic.measure,
    datacentres.NAME: datacentres.measure,
}


def main() -> int:
    """Measure, print, write."""
    parser = parser_of(f"{NAME}/run", __doc__)
    parser.add_argument("--workload", action="append", choices=list(WORKLOADS), help="leave out the others")
    parser.add_argument("--quick", action="store_true", help="fewer rounds and ways")
    arguments = parser.parse_args()
    rows: list[Row] = []
    why = why_unavailable()
    if why:
        skipped(NAME, "everything", why)
    else:
        for name in arguments.workload or WORKLOADS:
            print(f"--- {name}", file=sys.stderr, flush=True)
            rows += WORKLOADS[name](arguments.quick)
    report(NAME, arguments, rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
