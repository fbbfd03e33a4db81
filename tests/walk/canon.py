"""Name a state: two that differ only in ids, request numbers, times and which of the like replicas is which are one.

Ids of copies are told apart by their holders, and by which of the copies of one version is older, because that is how
the schedule breaks ties. Times are not told apart at all: time stands still in the walk.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import permutations, product

import msgspec
import xxhash

from tensorhub_core.ids import ReplicaName, SessionId
from tensorhub_core.state.records import Copy, Group, Round, VersionRecord, Worker
from tests.walk.actors import Actor
from tests.walk.world import NOW, World

_encode = msgspec.msgpack.Encoder().encode
Row = tuple[object, ...]
LONG_AGO = -3
"""Rounds before that are no different to anybody."""


def name_of(world: World) -> bytes:
    """Return the name of a state."""
    known = {worker.token: worker for worker in world.server.workers.values()}
    workers = [known.get(f"t{actor.life}") for actor in world.actors]
    locals_ = [_local(world, *pair) for pair in zip(world.actors, workers, strict=True)]
    best: list[tuple[int, ...]] = []
    least: list[Row] | None = None
    for order in _orders(world.scene.sources, world.scene.readers, world.scene.shards, world.scene.agents):
        row = [locals_[place] for place in order]
        if least is None or row < least:
            best, least = [order], row
        elif row == least:
            best.append(order)
    return min(xxhash.xxh3_128_digest(_encode(_name(world, workers, order, least))) for order in best)


@lru_cache(maxsize=16)
def _orders(sources: int, readers: int, shards: int, agents: int) -> list[tuple[int, ...]]:
    """Return the orders in which the places can be written down without a difference; shards change with all others."""
    found = []
    ends = (0, sources, sources + agents, sources + readers)
    kinds = [permutations(range(ends[kind], ends[kind + 1])) for kind in range(3)]
    for first, second, third in product(*kinds):
        for columns in permutations(range(shards)):
            found.append(tuple(r * shards + k for r in (*first, *second, *third) for k in columns))
    return found


def _local(world: World, a: Actor, worker: Worker | None) -> Row:
    """Return what there is to say about a process without naming another; of fixed types, so that it can be sorted."""
    server: Row = (-1,)
    if worker is not None:
        server = (
            worker.session not in world.server.sessions,
            worker.suspected,
            worker.last_seen_s < NOW,
            worker.dirty,
            worker.memory is None,
            worker.staging is None,
            worker.leaving,
        )
        server += (worker.offload_asked is None, worker.offload_failed is None, worker.handover_request is None)
    flags = (
        a.draining,
        a.unstaging,
        a.touched,
        a.running,
        a.asked_done,
        a.committed,
        a.aborted,
        a.in_grace,
        a.greet,
        a.came_back,
        a.derives,
        a.unheard,
    )
    numbers = (a.held, a.staged, a.last, a.high, a.promised, a.verified, -1 if a.want is None else a.want)
    return (
        a.alive,
        a.phase,
        a.mode,
        *numbers,
        *flags,
        tuple(a.cells),
        tuple(a.staged_cells),
        bool(a.offload_asked),
        tuple(sorted(a.offloads)),
        server,
    )


def _name(world: World, workers: list[Worker | None], order: tuple[int, ...], least: list[Row] | None) -> Row:
    spot = {place: index for index, place in enumerate(order)}
    where = {a.life: spot[a.place] for a in world.actors}
    server, model = world.server, world.model
    holders = {w.id: spot[place] for place, w in enumerate(workers) if w is not None}
    names = _copies(world, holders)
    columns = [spot[k] % world.scene.shards for k in range(world.scene.shards)]
    firsts = {a.replica: index for index, a in enumerate(_firsts(world, order))}
    rounds = [_group(world, model.groups.get(a.replica), names, columns) for a in _firsts(world, order)]
    people = [_links(world, world.actors[place], workers[place], where, names) for place in order]
    records = sorted(_record(r, firsts) for r in model.versions.values())
    flags = (world.listened, world.failed, server.listening, server.deserted, min(server.buried, 2), model.epoch)
    scene = world.scene
    leads = [
        (
            zone,
            lead.newest,
            lead.brought,
            lead.bringing,
            sorted((columns[k], n) for k, n in lead.marks.items()),
            lead.late,
        )
        for zone, lead in sorted(model.leads.items())
    ]
    told = [None if (worker := workers[place]) is None else worker.told for place in order] if scene.agents else []
    left = (
        scene.delays,
        scene.doubts,
        scene.departures,
        scene.leaves,
        scene.refusals,
        scene.crashes,
        scene.suspicions,
        scene.burials,
        scene.losses,
        scene.restarts,
    )
    return (least, people, rounds, records, model.high, model.heard, flags, left, leads, told)


def _record(r: VersionRecord, spots: dict[str, int]) -> Row:
    k = r.keeping
    names = [sorted(spots[name] for name in group) for group in (k.whole, k.held, k.custody, k.let_go)]
    kept = (k.secured_by is None, k.released, k.safe, k.reachable)
    return (*r.key, r.was_whole, spots[r.creator], sorted(map(str, r.manifests)), names, kept)


def _firsts(world: World, order: tuple[int, ...]) -> list[Actor]:
    return [world.actors[place] for place in order[:: world.scene.shards]]


def _copies(world: World, holders: dict[str, int]) -> dict[str, Row]:
    """Name the copies by holder, memory and age among those of their version and shard."""
    names: dict[str, Row] = {}
    ages: dict[tuple[object, ...], int] = {}
    for copy in sorted(world.server.copies.values(), key=lambda c: c.id):
        worker = world.server.workers[copy.worker]
        age = ages[copy.key, worker.shard] = ages.get((copy.key, worker.shard), -1) + 1
        kind = 1 if copy is worker.staged else 2 if copy is worker.awaited else 3 if copy in worker.offloads else 0
        names[copy.id] = (holders.get(copy.worker, -1), kind, age)
    return names


def _links(world: World, a: Actor, worker: Worker | None, where: dict[int, int], names: dict[str, Row]) -> Row:
    """Return how a process is tied to others, in its own view and in the server's."""
    server = world.server
    reads = sorted(
        (where.get(life, -1), which, prefix, lease in a.lost, lease in server.leases, epoch)
        for lease, (life, which, prefix, epoch) in a.sources.items()
    )
    opened = (sorted(a.open.values()), sorted(a.resend))
    group = world.model.groups.get(ReplicaName(a.replica))
    base = max(other.round for other in world.group(a)) if group is None else group.next_round
    again = _may_come_back(world)
    ended = None if a.ended is None or not again else (max(a.ended[0] - base, LONG_AGO), a.ended[1])
    rounds = (a.round - base, ended)
    if worker is None:
        return (reads, opened, rounds)
    end = worker.ended
    told = None if end is None or not again else (max(end.round - base, LONG_AGO), end.key)
    requests = (worker.unpublish_request in a.open, worker.unstage_request in a.open)
    copies = [_copy(copy, names) for copy in worker.copies()]
    leases = sorted((names[server.leases[i].copy], i in a.sources, server.leases[i].told) for i in worker.leases)
    return (reads, opened, rounds, told, requests, copies, leases)


def _copy(copy: Copy, names: dict[str, Row]) -> Row:
    flags = (copy.offered, bool(copy.sums), copy.depth, len(copy.leases))
    flags += (copy.partial, len(copy.known), bool(copy.content))
    return (names[copy.id], copy.key, copy.state.value, copy.prefix, *flags)


def _group(world: World, group: Group | None, names: dict[str, Row], columns: list[int]) -> Row:
    """Name a replica's rounds, but those that have ended and that nobody can join any more."""
    if group is None:
        return ()
    least = min(
        (a.round for a in world.actors if a.replica == group.replica and a.alive and world.worker(a)), default=0
    )
    members = sorted(columns[shard] for shard in group.members)
    open_rounds = [r for _, r in sorted(group.rounds.items()) if r.verdict is None or r.number >= least]
    rounds = [_round(world, group, r, names, columns) for r in open_rounds]
    if not _may_come_back(world):
        return (members, rounds)
    in_rounds = [a.round for a in world.actors if a.replica == group.replica and a.alive and a.in_round]
    ends = [
        (number - group.next_round, type(end).__name__, getattr(end, "code", ""), getattr(end, "number", 0))
        for number, end in sorted(group.ended.items())
        if number in in_rounds
    ]
    first = None if group.first_round is None else max(group.first_round - group.next_round, LONG_AGO)
    return (members, rounds, ends, first)


def _may_come_back(world: World) -> bool:
    """Tell whether somebody may yet say hello again, or has come back to a round: then how rounds ended matters."""
    scene = world.scene
    if scene.losses + scene.restarts + scene.burials:
        return True
    if any(a.alive and (a.greet or a.phase == "rejoining" or world.worker(a) is None) for a in world.actors):
        return True
    return any(r.resumed for group in world.model.groups.values() for r in group.rounds.values())


def _is_current(world: World, session: SessionId) -> bool:
    return session in world.server.sessions


def _round(world: World, group: Group, r: Round, names: dict[str, Row], columns: list[int]) -> Row:
    verdict = None if r.verdict is None else (type(r.verdict).__name__, getattr(r.verdict, "code", ""))
    joined = sorted(
        (
            columns[shard],
            *(j.join_request is None, j.done_request is None, j.orphaned_since_s is None, j.prefix),
            *(j.have, j.promised, _is_current(world, j.session), j.source_request is None, j.rereads),
        )
        for shard, j in r.joined.items()
    )
    leases = sorted((columns[shard], len(ids)) for shard, ids in r.leases.items())
    avoid = sorted(
        (columns[shard], sorted((names.get(copy, ()), kind) for copy, kind in tried.items()))
        for shard, tried in r.avoid.items()
        if tried
    )
    stalls = sorted((columns[shard], names.get(copy, ()), len(times)) for (shard, copy), times in r.stalls.items())
    unheard = sorted(columns[shard] for shard in r.unheard)
    ties = (joined, leases, avoid, stalls, unheard, r.awaits_silent, r.resumed, r.join_by_s is None)
    return (r.number - group.next_round, r.want, r.mode, r.key, verdict, *ties)
