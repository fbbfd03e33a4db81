"""How fast real processes bring a trainer's weights into an engine of another layout, in one run with other ways.

    python bench/reshard.py [--layers N] [--rounds N] [--cases A,B] [--transports A,B] [--json FILE]

Every rank is a process with its own memory; the model has about 1 GiB. *Ours* is the whole of it: the trainer's ranks
have published, and all ranks of the engine call `replicate`: promise, plan, verified read, commit. *Same layout* is the
same from as many ranks in the engine's own layout, where nothing is resharded. *Gather and broadcast* is the usual way
over gloo: gather full tensors in the trainer, broadcast them to the engine's ranks, which slice. In each round every
way runs once; figures are medians over the rounds, a ratio is the median of each round's. What arrives is compared once
a way. Time is from the first rank's begin to the last one's end; CPU seconds are those of all ranks.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import socket
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from common import Row, at_least, hub, limit, parser_of, report
from layouts import SMALL, ModelShape, layouts_of
from remote import Remote

from tensorhub_core.layout.plan import ExactPolicy, plan_read
from tensorhub_core.layout.summary import summarize

NAME = "reshard"
GIB = 1 << 30
SAME_GOAL, GLOO_GOAL = 0.8, 1.0
SETUP_TIMEOUT_S, RUN_TIMEOUT_S = 120.0, 120.0
GLOO = "gather and broadcast"


@dataclass(frozen=True)
class Case:
    """A trainer's layout and an engine's; `contiguous`: every rank of the trainer is needed in whole runs."""

    name: str
    trainer: str
    engine: str
    contiguous: bool


CASES = (
    Case("Megatron TP2PP2 to TP2", "megatron 2 2", "engine 2", True),
    Case("Megatron TP2PP2 to TP1", "megatron 2 2", "engine 1", True),
    Case("FSDP2 to TP2", "fsdp 2", "engine 2", False),
)

Figures = dict[str, list[tuple[float, float]]]
"""Seconds and CPU seconds of every round, by way; the first one is of the first version."""


class Ranks:
    """The processes of one case."""

    def __init__(self, case: Case, model: ModelShape, stack: contextlib.ExitStack) -> None:
        self.case = case
        self._fields = {key: value for key, value in dataclasses.asdict(model).items() if key != "dense_layers"}
        counts = [len(layouts_of(model, kind)[1]) for kind in (case.trainer, case.engine)]
        trainers, engines = ([stack.enter_context(Remote("reshard_side.py")) for _ in range(count)] for count in counts)
        self.trainers: list[Remote] = trainers
        self.engines: list[Remote] = engines
        self._versions = itertools.count(1)

    @property
    def everyone(self) -> list[Remote]:
        """Return all ranks, the trainer's first."""
        return [*self.trainers, *self.engines]

    def hold(self) -> None:
        """Fill the trainer's memory, and that of ranks in the engine's own layout; allocate the engine's."""
        case, alike = self.case, self.trainers[: len(self.engines)]
        self._all(self.trainers, "hold", lambda rank: {"kind": case.trainer, "rank": rank, "filled": True})
        self._all(alike, "hold", lambda rank: {"kind": case.engine, "rank": rank, "filled": True})
        self._all(self.engines, "hold", lambda rank: {"kind": case.engine, "rank": rank, "filled": False})

    def connect(self, server: str, key: str, kind: str, transport: str) -> None:
        """Connect those who hold `kind` among the trainer's ranks, and the engine's, as the model `key`."""
        trainers = self.trainers if kind == self.case.trainer else self.trainers[: len(self.engines)]
        for ranks, held, replica in ((trainers, kind, "trainer"), (self.engines, self.case.engine, "engine")):
            about = {"key": key, "kind": held, "server": server, "replica": replica, "transport": transport}
            _wait([rank.begin("connect", **about) for rank in ranks])

    def replicate(self, key: str, kind: str) -> tuple[float, float]:
        """Publish the next version of a model and have the engine fetch it; returns seconds and CPU seconds."""
        trainers = self.trainers if kind == self.case.trainer else self.trainers[: len(self.engines)]
        version = next(self._versions)
        _wait([rank.begin("publish", key=key, version=version) for rank in trainers])
        return self._timed(self.engines, "update", key=key, version=version)

    def join(self) -> None:
        """Make gloo's process group."""
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        kinds = [self.case.trainer, self.case.engine]
        self._all(self.everyone, "join", lambda rank: {"kinds": kinds, "rank": rank, "port": port})

    def gather(self) -> tuple[float, float]:
        """Gather, broadcast and slice; returns seconds and CPU seconds."""
        return self._timed(self.everyone, "gather")

    def check(self, way: str) -> None:
        """Compare what the engine has with the model, and overwrite it."""
        wrong = _wait([rank.begin("wrong", kind=self.case.engine) for rank in self.engines])
        if any(wrong):
            raise SystemExit(f"{self.case.name}: {way} left {wrong} parts wrong")
        _wait([rank.begin("blank", kind=self.case.engine) for rank in self.engines])

    def _timed(self, ranks: Sequence[Remote], command: str, **arguments: Any) -> tuple[float, float]:
        cpu = sum(_wait([rank.begin("cpu") for rank in self.everyone]))
        spans = _wait([rank.begin(command, **arguments) for rank in ranks])
        cpu = sum(_wait([rank.begin("cpu") for rank in self.everyone])) - cpu
        return max(end for _, end in spans) - min(begin for begin, _ in spans), cpu

    def _all(self, ranks: Sequence[Remote], command: str, arguments: Callable[[int], dict[str, Any]]) -> None:
        _wait([rank.begin(command, model=self._fields, **arguments(number)) for number, rank in enumerate(ranks)])


def _wait(futures: Sequence[Any]) -> list[Any]:
    return [future.result(RUN_TIMEOUT_S) for future in futures]


def run_case(case: Case, model: ModelShape, rounds: int, transports: Sequence[str], server: str) -> Figures:
    """Measure all ways of one case."""
    with contextlib.ExitStack() as stack:
        ranks = Ranks(case, model, stack)
        ranks.hold()
        ways: dict[str, Callable[[], tuple[float, float]]] = {}
        for transport in transports:
            for what, kind in (("ours", case.trainer), ("same layout", case.engine)):
                key = f"{case.name}, {what} {transport}"
                ranks.connect(server, key, kind, transport)
                ways[f"{what} {transport}"] = lambda key=key, kind=kind: ranks.replicate(key, kind)  # type: ignore[misc]
        ranks.join()
        ways[GLOO] = ranks.gather
        figures: Figures = {}
        for way, run in ways.items():
            figures[way] = [run()]
            ranks.check(way)
        for number in range(rounds):
            # Every other round backwards, so that no way always follows the same one.
            for way, run in list(ways.items())[:: -1 if number % 2 else 1]:
                figures[way].append(run())
        _wait([rank.begin("close") for rank in ranks.engines])
        _wait([rank.begin("close") for rank in ranks.trainers])
        return figures


def needed_of(case: Case, model: ModelShape) -> tuple[int, float]:
    """Return the bytes that all ranks of the engine need, and how many times as many a worker reads."""
    sources, wanted = (layouts_of(model, kind)[1] for kind in (case.trainer, case.engine))
    told = [summarize(plan_read(each, sources, exact=ExactPolicy()), each, sources) for each in wanted]
    needed = sum(each.needed_bytes for each in told)
    return needed, sum(each.read_bytes for each in told) / needed


def rows_of(case: Case, model: ModelShape, figures: Figures) -> list[Row]:
    """Return the rates, costs and ratios of one case."""
    needed, read = needed_of(case, model)
    rows = [Row(f"{case.name}: needed", needed / 1e9, "GB"), limit(f"{case.name}: read / needed", read, "x", 1.02)]
    for way, rounds in figures.items():
        seconds, cpu = (statistics.median(column) for column in zip(*rounds[1:], strict=True))
        rows.append(Row(f"{case.name}: {way}", needed / seconds / 1e9, "GB/s"))
        rows.append(Row(f"{case.name}: {way}, CPU of all", cpu * GIB / needed, "s/GiB"))
        rows.append(Row(f"{case.name}: {way}, first version", needed / rounds[0][0] / 1e9, "GB/s"))
    for way in figures:
        if way.startswith("ours"):
            same, name = way.replace("ours", "same layout"), f"{case.name}: {way}"
            value = ratio(figures, way, same)
            rows.append(
                at_least(f"{name} / {same}", value, "ratio", SAME_GOAL)
                if case.contiguous
                else Row(f"{name} / {same}", value, "ratio")
            )
            rows.append(at_least(f"{name} / {GLOO}", ratio(figures, way, GLOO), "ratio", GLOO_GOAL))
    return rows


def ratio(figures: Figures, way: str, other: str) -> float:
    """Return the median over the rounds, after the first, of how fast `way` is in terms of `other`."""
    pairs = zip(figures[way][1:], figures[other][1:], strict=True)
    return statistics.median(b[0] / a[0] for a, b in pairs)


def main() -> int:
    """Measure, print, write."""
    parser = parser_of(NAME, __doc__)
    names = ", ".join(case.name for case in CASES)
    parser.add_argument("--layers", type=int, default=SMALL.layers, help="layers of the model, an even number (8)")
    parser.add_argument("--rounds", type=int, default=5, help="rounds of all ways per case, after the first (5)")
    parser.add_argument("--cases", default="", help=f"only those with this text in their name: {names}")
    parser.add_argument("--transports", default="tcp,auto", help="ways of the product between ranks (tcp,auto)")
    arguments = parser.parse_args()
    model = dataclasses.replace(SMALL, layers=arguments.layers)
    rows: list[Row] = []
    with hub("--log-level", "warning", "--retain", "0") as (server, _):
        for case in CASES:
            if arguments.cases in case.name:
                figures = run_case(case, model, arguments.rounds, arguments.transports.split(","), server)
                rows += rows_of(case, model, figures)
    report(NAME, arguments, rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
