"""The figures: each function simulates what one shows, and returns it with the figures of merit beside the paper's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from bench.common import Row, at_least, limit
from bench.sim.assumptions import SIZES, Assumption, Assumptions, through_the_hub
from bench.sim.datacentres import FAR, datacentres, fleet_of
from bench.sim.elastic import Elastic, churn, joining
from bench.sim.failures import failures
from bench.sim.fleet import HOME
from bench.sim.plots import Edge, Figure, Panel, Series
from bench.sim.standalone import Standalone, standalone

STANDALONE_GOAL, ELASTIC_GOAL, DATACENTRES_GOAL, GAP_GOAL = 6.7, 4.8, 19.0, 1.15
Result = tuple[list[Row], Figure]


@dataclass(frozen=True)
class Plan:
    """How much is simulated: `gpus` of the standalone fleet, readers up to `most` in the figure of growth."""

    assumptions: Assumptions
    gpus: int = 1024
    most: int = 1024
    seed: int = 1
    quick: bool = False

    @property
    def sizes(self) -> tuple[str, ...]:
        """Return the models of which at least two replicas fit."""
        return tuple(name for name, size in SIZES.items() if 2 * size.gpus <= self.gpus)


def draw_standalone(plan: Plan) -> Result:
    """Simulate stall per version by model, and over how far apart rollouts are ready."""
    a = plan.assumptions
    by_size = [_standalone(plan, name, a.skew_s.value) for name in plan.sizes]
    at_once = [_standalone(plan, name, 0.0) for name in plan.sizes]
    skews = (0.0, 1.0, 2.0, 5.0, 10.0) if plan.quick else (0.0, 1.0, 2.0, 5.0, 10.0, 20.0, 30.0)
    largest = plan.sizes[-1]
    over = [_standalone(plan, largest, skew_s) for skew_s in skews]
    rows = []
    for one in by_size:
        label = f"standalone, {one.size}, {one.gpus:,} GPUs, ready within {one.skew_s:g} s"
        rows.append(at_least(f"{label}: NCCL / ours", one.ratio, "x", STANDALONE_GOAL))
        rows.append(Row(f"{label}: NCCL of whole tensors / ours", one.nccl_whole / one.ours, "x"))
        rows.append(Row(f"{label}: star / ours", one.star / one.ours, "x"))
        rows.append(limit(f"{label}: ours / physical bound", one.gap, "x", GAP_GOAL))
        rows.append(Row(f"{label}: sent by the trainer", one.sent_models, "models"))
    for one in at_once:
        label = f"standalone, {one.size}, {one.gpus:,} GPUs, all at the same moment"
        rows.append(Row(f"{label}: NCCL / ours", one.ratio, "x"))
        rows.append(limit(f"{label}: ours / physical bound", one.gap, "x", GAP_GOAL))
        rows.append(Row(f"{label}: hub busy", 100 * one.hub_busy, "%"))
    enough = [one.skew_s for one in over if one.ratio >= STANDALONE_GOAL]
    if enough:
        case = f"standalone, {largest}: rollouts ready within so long for {STANDALONE_GOAL:g}x less stall than NCCL"
        rows.append(Row(case, min(enough), "s"))
    bars = Panel(
        "bars",
        f"GPU-seconds of stall per version, rollouts ready within {a.skew_s.value:g} s",
        "model",
        "GPU-seconds",
        plan.sizes,
        _contenders(by_size),
        log_y=True,
    )
    ratios = (
        Series("NCCL, each shard / ours", [one.ratio for one in over]),
        Series("star / ours", [one.star / one.ours for one in over]),
        Series("ours / physical bound", [one.gap for one in over]),
    )
    text = f"{largest}: how many times the stall, over how far apart rollouts are ready"
    lines = Panel("lines", text, "seconds within which rollouts are ready", "times", skews, ratios, log_y=True)
    title = f"Standalone rollouts, {plan.gpus:,} GPUs"
    return rows, Figure("standalone", title, "A collective waits for the last one; reads do not.", (bars, lines))


def _standalone(plan: Plan, name: str, skew_s: float) -> Standalone:
    size = SIZES[name]
    return standalone(plan.assumptions, size, plan.gpus // size.gpus, skew_s, plan.seed)


def _contenders(runs: Sequence[Standalone]) -> tuple[Series, ...]:
    return (
        Series("physical bound", [one.bound for one in runs]),
        Series("ours", [one.ours for one in runs]),
        Series("NCCL, each shard", [one.nccl for one in runs]),
        Series("NCCL, whole tensors", [one.nccl_whole for one in runs]),
        Series("star", [one.star for one in runs]),
    )


def draw_elastic(plan: Plan) -> Result:
    """Simulate spot rollouts that come at once, and a fleet in which they come and die."""
    a, name = plan.assumptions, "36B"
    standing = 8 if plan.quick else 32
    counts = (1, 2, 4, 8) if plan.quick else (1, 2, 4, 8, 16, 32, 64)
    runs = [joining(a, SIZES[name], standing, count, plan.seed) for count in counts]
    enough = [run.joiners for run in runs if run.ratio >= ELASTIC_GOAL]
    chosen = next(run for run in runs if run.joiners == a.elastic_joiners.value)
    moved = churn(a, SIZES[name], standing, standing, 0.25, plan.seed, 2 if plan.quick else 4)
    label = f"elastic, {name}, {chosen.joiners} join {standing} at once"
    rows = [
        at_least(f"{label}: star / ours, mean update", chosen.ratio, "x", ELASTIC_GOAL),
        Row(f"{label}: star / ours, last update", chosen.star_last_s / chosen.ours_last_s, "x"),
        at_least(f"{label}: plain star / ours, mean update", chosen.plain_star_s / chosen.ours_s, "x", ELASTIC_GOAL),
        Row(f"{label}: NCCL with a new communicator / ours", chosen.nccl_s / chosen.ours_s, "x"),
        limit(f"{label}: ours / physical bound", chosen.gap, "x", GAP_GOAL),
    ]
    if enough:
        case = f"elastic, {name}: spot rollouts that come at once for {ELASTIC_GOAL:g}x faster updates than a star"
        rows.append(Row(case, min(enough), ""))
    label = f"elastic, {name}, {standing} firm and {standing} spot, {moved.killed} killed in {moved.versions} versions"
    rows += [
        Row(f"{label}: mean update / one in which nobody dies", moved.ours_s / moved.calm_s, "x"),
        at_least(f"{label}: star / ours, mean update", moved.star_s / moved.ours_s, "x", ELASTIC_GOAL),
        Row(f"{label}: rounds that broke", moved.failed, ""),
    ]
    lines = Panel(
        "lines",
        f"Mean time of an update of spot rollouts that come at once, {name}",
        "spot rollouts",
        "seconds",
        counts,
        _elastic_series(runs),
        log_x=True,
        log_y=True,
    )
    values = (moved.calm_s, moved.ours_s, moved.nccl_s, moved.star_s)
    names = ("ours, nobody dies", "ours", "NCCL, new communicator", "star, nobody dies")
    text = f"{standing} firm and {standing} spot rollouts, a quarter of these killed and replaced in each version"
    bars = Panel("bars", text, "", "seconds, mean update", names, (Series("mean update", values),))
    return rows, Figure("elastic", "Elastic rollouts", "", (lines, bars))


def _elastic_series(runs: Sequence[Elastic]) -> tuple[Series, ...]:
    return (
        Series("physical bound", [run.bound_s for run in runs]),
        Series("ours", [run.ours_s for run in runs]),
        Series("star", [run.star_s for run in runs]),
        Series("NCCL, new communicator", [run.nccl_s for run in runs]),
    )


def draw_datacentres(plan: Plan) -> Result:
    """Simulate rollouts of another datacentre, with and without a seed agent there."""
    a = plan.assumptions
    names = ("9B", "36B") if plan.quick else ("9B", "36B", "260B", "1T")
    remote = 4 if plan.quick else a.remote_replicas.value
    by_size = [datacentres(a, SIZES[name], remote, plan.seed) for name in names]
    counts = (1, 2, 4, 8) if plan.quick else (1, 2, 4, 8, 16, 32)
    over = [datacentres(a, SIZES["36B"], count, plan.seed) for count in counts]
    rows = []
    for one in by_size:
        label = f"datacentres, {one.size}, {one.remote} remote"
        rows.append(at_least(f"{label}: star / ours with a seed agent", one.ratio, "x", DATACENTRES_GOAL))
        rows.append(Row(f"{label}: star / ours without one", one.ratio_direct, "x"))
        rows.append(limit(f"{label}: ours with a seed agent / bound", one.agent_s / one.bound_agent_s, "x", GAP_GOAL))
        rows.append(limit(f"{label}: ours without one / bound", one.direct_s / one.bound_direct_s, "x", GAP_GOAL))
        rows.append(limit(f"{label}: crossed, without an agent", one.direct_crossed, "models", 1.05))
        rows.append(limit(f"{label}: crossed, with an agent", one.agent_crossed, "models", 1.05))
    bars = Panel(
        "bars",
        f"Mean stall of {remote} remote replicas per version",
        "model",
        "seconds",
        names,
        (
            Series("physical bound, agent", [one.bound_agent_s for one in by_size]),
            Series("ours, seed agent", [one.agent_s for one in by_size]),
            Series("ours, no agent", [one.direct_s for one in by_size]),
            Series("star", [one.star_s for one in by_size]),
        ),
        log_y=True,
    )
    enough = [one.remote for one in over if one.ratio >= DATACENTRES_GOAL]
    if enough:
        case = f"datacentres, 36B: remote replicas for {DATACENTRES_GOAL:g}x less stall than a star"
        rows.append(Row(case, min(enough), ""))
    lines = Panel(
        "lines",
        "36B: how many times the stall of a remote replica",
        "remote replicas",
        "times",
        counts,
        (
            Series("star / ours, seed agent", [one.ratio for one in over]),
            Series("star / ours, no agent", [one.ratio_direct for one in over]),
        ),
        log_x=True,
        log_y=True,
    )
    return rows, Figure("datacentres", "Rollouts in another datacentre", "", (bars, lines))


def draw_failures(plan: Plan) -> Result:
    """Simulate what failures cost."""
    size, replicas = SIZES["36B"], 8 if plan.quick else 32
    found = failures(plan.assumptions, size, replicas, plan.seed)
    rows = []
    for one in found:
        rows.append(
            Row(f"failures, {one.size}, {replicas} rollouts: {one.what}: added stall, mean", one.added_mean_s, "s")
        )
        added = one.last_s - one.calm_last_s
        rows.append(Row(f"failures, {one.size}, {replicas} rollouts: {one.what}: added stall, last", added, "s"))
        rows.append(Row(f"failures, {one.size}, {replicas} rollouts: {one.what}: rounds that broke", one.failed, ""))
        if one.crossed:
            rows.append(Row(f"failures, {one.size}: {one.what}: crossed", one.crossed, "models"))
    bars = Panel(
        "bars",
        f"{size.name}, {replicas} rollouts: stall of a replica",
        "",
        "seconds",
        [one.what for one in found],
        (
            Series("nothing fails, mean", [one.calm_mean_s for one in found]),
            Series("mean", [one.mean_s for one in found]),
            Series("last", [one.last_s for one in found]),
        ),
    )
    return rows, Figure("failures", "What failures cost", "Killed half-way through an update of all.", (bars,))


def draw_growth(plan: Plan) -> Result:
    """Simulate how the time of a version grows with its readers, when all ask at the same moment."""
    a, hub_costs = plan.assumptions, ("hub_message_s", "hub_push_s", "hub_join_s")
    fast = {name: Assumption(getattr(a, name).value / 10, "s", "what if") for name in hub_costs}
    cases = {
        "as it is": a,
        "if the hub were ten times as fast": replace(a, **fast),
        "if followers heard of progress through the hub": through_the_hub(a),
    }
    rows, panels = [], []
    for name in ("9B", "1T") if plan.gpus >= 4 * SIZES["1T"].gpus else ("9B",):
        size = SIZES[name]
        most = plan.most if name == "9B" else min(plan.most, plan.gpus)
        counts = [2**k for k in range(3 if name == "9B" else 0, (most // size.gpus).bit_length())]
        runs = {
            case: [standalone(each, size, count, 0.0, plan.seed) for count in counts] for case, each in cases.items()
        }
        for one in runs["as it is"]:
            label = f"growth, {name}, {one.replicas:,} replicas at the same moment"
            rows.append(Row(f"{label}: last one / one copy", one.ours_last_s / (one.bound / one.gpus), "x"))
            rows.append(Row(f"{label}: hub busy", 100 * one.hub_busy, "%"))
        times = [Series(case, [o.ours_last_s for o in each]) for case, each in runs.items()]
        times.append(Series("one copy (physical bound)", [o.bound / o.gpus for o in runs["as it is"]]))
        label = f"replicas of {size.gpus} GPU{'s' * (size.gpus > 1)}"
        panels.append(Panel("lines", f"{name}: until the last one has it", label, "seconds", counts, times, True, True))
        busy = [Series(case, [100 * o.hub_busy for o in each]) for case, each in runs.items()]
        panels.append(Panel("lines", f"{name}: how busy the hub is meanwhile", label, "%", counts, busy, True, False))
    title = "Replicas that ask for one version at the same moment"
    return rows, Figure("growth", title, "", panels)


def draw_tree(plan: Plan) -> Result:
    """Simulate a fan-out over two datacentres and show who reads from whom."""
    size, near, far = SIZES["36B"], 8, 6
    fleet = fleet_of(plan.assumptions, size, far, plan.seed, agent=False)
    rollouts = [fleet.add(f"rollout-{number}", HOME) for number in range(near)]
    fleet.connect(rollouts)
    others = [replica for name, replica in fleet.replicas.items() if name != "trainer"]
    trainer = fleet.replicas["trainer"]
    fleet.renew(trainer, fleet.pass_versions(trainer, others) + 1)
    fleet.update_all(others, [fleet.events.now + 0.05 * number for number in range(len(others))])
    edges = []
    for replica in others:
        worker = replica.workers[0]
        zone = worker.session.identity.place.zone
        for source in dict.fromkeys(source for _, source, _ in worker.sources):
            from_zone = fleet.replicas[source].workers[0].session.identity.place.zone
            edges.append(Edge(replica.name, source, zone, from_zone != zone))
    crossing = sum(edge.wan for edge in edges)
    rows = [limit(f"tree, {far} remote readers: reads between datacentres", crossing, "", 1.0)]
    title = f"Who reads from whom: {near} rollouts beside the trainer, {far} in the zone {FAR!r}"
    return rows, Figure("tree", title, "The dashed read crosses between datacentres.", edges=edges)


FIGURES: dict[str, Callable[[Plan], Result]] = {
    "standalone": draw_standalone,
    "elastic": draw_elastic,
    "datacentres": draw_datacentres,
    "failures": draw_failures,
    "growth": draw_growth,
    "tree": draw_tree,
}
