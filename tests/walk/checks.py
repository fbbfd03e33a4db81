"""What the machine cannot see: the bytes, what processes were told before, and who still reads."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tensorhub_core.ids import ReplicaName
from tensorhub_core.state import invariants, versions
from tensorhub_core.state.events import Effect, Send
from tensorhub_core.state.messages import Committed, Failure, LeaseLost, NothingNewer, Ok, Promise
from tensorhub_core.state.records import CopyState, Round
from tests.walk import zones
from tests.walk.actors import LETTERS, SEGMENTS, Actor, Violation

ENDED = 0
"""Stands for the life of a server in a lease that had ended when that server died."""

if TYPE_CHECKING:
    from tests.walk.world import World


def listens(world: World) -> bool:
    """Tell whether the server of a later life still has to listen: somebody has come back, and its grace lasts."""
    return world.server.in_grace(world.server.now_s)


def rounds_with(world: World, what: str) -> frozenset[tuple[str, int]]:
    """Return the rounds that have a `verdict`, or a promise (`key`)."""
    groups = world.model.groups.values()
    return frozenset((g.replica, r.number) for g in groups for r in g.rounds.values() if getattr(r, what) is not None)


def may_be_lost(world: World) -> bool:
    """Tell whether an answer may still be lost on this path."""
    return world.scene.restarts + world.scene.losses > 0


def rightful(world: World, lease: str, epoch: int) -> bool:
    """Tell whether a reader may read under a lease: it lives, or the server that granted it died a moment ago."""
    if epoch == ENDED:
        return False
    return lease in world.server.leases or (epoch < world.server.config.server_epoch and not world.listened)


def of_state(world: World) -> list[str]:
    """Return the laws that a state breaks."""
    return [
        *invariants.check(world.server),
        *bytes_are_right(world),
        *one_promise(world),
        *ids_live_once(world),
        *retained(world),
        *heard(world),
        *one_seed(world),
        *zones.waits_in_vain(world),
    ]


def bytes_are_right(world: World) -> list[str]:
    """L3, L12: what a copy offers of a living process is in its memory."""
    found = []
    for copy in world.server.copies.values():
        worker = world.server.workers[copy.worker]
        actor = next((a for a in world.actors if f"t{a.life}" == worker.token), None)
        if actor is None or not actor.alive:
            continue
        right = 100 * copy.key[0] + copy.key[1]
        row = actor.memory(LETTERS.index(copy.memory.placement[:1]), right)
        offered = SEGMENTS if copy.state not in (CopyState.AWAITED, CopyState.FILLING) else copy.prefix
        if row[:offered] != [right] * offered:
            found.append(f"L12: {actor.name} offers {offered} segments of version {right} and has {row}")
    return found


def one_promise(world: World) -> list[str]:
    """L2: all shards of a replica that are in a round of one life of the server are promised the same."""
    found: dict[tuple[str, int], Actor] = {}
    for actor in world.actors:
        if (
            actor.alive
            and actor.phase in ("promised", "reading", "relocating", "done")
            and world.worker(actor) is not None
        ):
            other = found.setdefault((actor.replica, actor.round), actor)
            if other.promised != actor.promised and not (other.aborted or actor.aborted):
                return [f"L2: {actor.name} is promised {actor.promised}, {other.name} {other.promised}"]
    return []


def ids_live_once(world: World) -> list[str]:
    """L8: what an earlier life of the server called a lease is no lease of this one."""
    epoch = world.server.config.server_epoch
    return [
        f"L8: {lease} of {actor.name} lives again"
        for actor in world.actors
        for lease, where in actor.sources.items()
        if where[3] != epoch and lease in world.server.leases
    ]


def retained(world: World) -> list[str]:
    """L11: without a failure, the newest whole version is always held whole somewhere."""
    high = world.model.high
    if world.scene.retain == 0 or world.failed or high is None:
        return []
    code = 100 * high[0] + high[1]
    for actor in world.actors:
        if all(a.alive and keeps(a, code) for a in world.group(actor)):
            return []
    return [f"L11: nobody holds version {code}, and nobody has failed"]


def heard(world: World) -> list[str]:
    """L10: the server knows of every version that those who have said hello ever heard of."""
    newest = latest_code(world)
    found = [a for a in world.actors if a.alive and a.high > newest and world.worker(a) is not None]
    return [f"L10: {a.name} has heard of version {a.high}, and the server knows of {newest}" for a in found]


def one_seed(world: World) -> list[str]:
    """One reader of a zone fetches a version from another zone; one more for each that is left, or may have died."""
    found: list[str] = []
    if not world.scene.zones:
        return found
    for (key, zone), leases in world.model.index.crossing.items():
        replicas = {world.server.workers[world.server.leases[lease].reader].replica for lease in leases}
        if len(replicas) > 1 + world.failed + world.doubts:
            found.append(f"zones: {', '.join(sorted(replicas))} all fetch {key} into {zone}")
    return found


def keeps(actor: Actor, code: int) -> bool:
    """Tell whether a process has a version that it was published, has offloaded, or may have committed."""
    return code in (actor.held, *actor.offloads) or (actor.asked_done and actor.promised == code)


def before_overwriting(world: World, actor: Actor, which: int, code: int = 0, first: int = 0) -> None:
    """L3, L5: nobody who may read a memory does so when it changes from segment `first` on."""
    for reader in world.actors:
        if not reader.alive or reader is actor or reader.phase == "over":
            continue
        for lease, (life, where, prefix, epoch) in reader.sources.items():
            reads = life == actor.life and where == which and prefix > first and code in (0, reader.promised)
            if reads and lease not in reader.lost and rightful(world, lease, epoch):
                raise Violation(f"L3, L5: {actor.name} may change its memory while {reader.name} reads it")


def after_step(world: World, effects: list[Effect], was_listening: bool) -> None:
    """Check what one step of the machine says."""
    lost = {e.message.lease for e in effects if isinstance(e, Send) and isinstance(e.message, LeaseLost)}
    committed = {e.session for e in effects if isinstance(e, Send) and isinstance(e.message, Committed)}
    for effect in effects:
        if not isinstance(effect, Send):
            continue
        actor = world.by_session(effect.session)
        if actor is None:
            continue
        if isinstance(effect.message, Committed):
            others = [a for a in world.group(actor) if a is not actor and world.worker(a) is not None]
            reachable = [
                a.name for a in others if a.session not in committed and a.ended != (actor.round, actor.promised)
            ]
            if reachable:
                raise Violation(f"L13: {actor.name} has committed, {', '.join(reachable)} not")
        early = isinstance(effect.message, Promise | NothingNewer) and was_listening and listens(world)
        if early and (actor.replica, actor.round) not in world.promised:
            raise Violation(f"L5: {actor.name} is told {type(effect.message).__name__} while the server listens")
        withdraws = actor.open.get(effect.request) in ("unpublish", "unstage") and isinstance(effect.message, Ok)
        for reader in world.actors if withdraws and lost else ():
            if any(lease in lost and where[0] == actor.life for lease, where in reader.sources.items()):
                raise Violation(f"L3: {actor.name} may withdraw what {reader.name} reads")
        if was_listening and listens(world) and withdraws and actor.held:
            raise Violation(f"L5: {actor.name} may withdraw while the server listens")


def promise(world: World, actor: Actor, message: Promise, code: int, rejoined: bool) -> None:
    """L2, L3, L10, L13: check a promise against what its reader was told before."""
    if actor.promised not in (0, code) and not rejoined:
        raise Violation(f"L2: the promise of {actor.name} changes from {actor.promised} to {code}")
    first = (actor.replica, actor.round) not in world.promised
    known = max(actor.high, zones.newest_for(world, actor, latest_code(world)) if first else 0)
    if actor.want is None and code < known and actor.mode != "install" and actor.phase == "joining":
        raise Violation(f"L10: version {known} is known, and {actor.name} is promised {code} as the latest")
    early = first and zones.held_back(world, actor, code) and actor.want is None and actor.mode != "install"
    if early and code > known and actor.phase == "joining":
        raise Violation(f"L10: {actor.name} is promised version {code} before it is whole in its zone")
    if actor.want is not None and code % 100 != actor.want:
        raise Violation(f"L2: {actor.name} asks for {actor.want} and is promised {code}")
    if actor.mode == "install":
        shards = [a for a in world.group(actor) if a.alive]
        if any(a.staged != code or a.phase == "idle" for a in shards):
            raise Violation(f"L13: {actor.name} installs version {code} that not every shard has staged and installs")
        return
    for source in message.sources:
        copy = world.server.copies[world.server.leases[source.lease].copy]
        if copy.state is CopyState.DRAINING and not excused(world, actor):
            raise Violation(f"L3, L7: {actor.name} is promised version {code} of a copy that is being taken back")
        fresh = first and not any(a.in_grace for a in world.group(actor))
        if fresh and copy.state is CopyState.PUBLISHED and not offers(world, source.worker, copy.key):
            raise Violation(f"L1: {actor.name} is promised version {code} of {source.replica}, which has only a part")


def offers(world: World, holder: str, key: tuple[int, int]) -> bool:
    """Tell whether all shards of a worker's replica offer a version."""
    workers = world.server.workers
    group = world.model.groups[next(w.replica for w in workers.values() if w.id == holder)]
    copies = [workers[member].copy_of(key, (CopyState.PUBLISHED,)) for member in group.members.values()]
    return len(copies) == group.num_shards and None not in copies


def latest_code(world: World) -> int:
    """Return the newest version that ever was whole or heard of; 0 if none."""
    newest = versions.latest(world.model)
    return 0 if newest is None else 100 * newest[0] + newest[1]


def excused(world: World, actor: Actor) -> bool:
    """Tell whether a round may read what is being taken back: it was promised before, by this server or another."""
    return (actor.replica, actor.round) in world.promised or any(a.in_grace for a in world.group(actor))


def unavailable(world: World, actor: Actor, message: Failure) -> None:
    """L6, L11: nobody is told that a version is gone which a replica that lives and is heard of offers."""
    if message.code != "version_unavailable" or actor.phase != "joining":
        return
    if (actor.replica, actor.round) in world.over | world.promised or not any(a.held for a in world.actors):
        return  # its round had ended, or its promise is broken, or nobody holds anything
    current = _round_of(world, actor)
    if current is not None and current.avoid:
        return
    code, comes_back = latest_code(world), actor.in_grace and actor.promised == latest_code(world)
    if actor.want is not None:
        return
    for other in world.actors:
        group = world.group(other)
        if other.replica == actor.replica or any(
            not a.alive or a.held != code or (a.draining and not comes_back) for a in group
        ):
            continue
        workers = [world.worker(a) for a in group]
        if all(w is not None and not w.suspected for w in workers):
            raise Violation(f"L6: {actor.name} is told that version {code} is gone, and {other.replica} offers it")


def refused(world: World, actor: Actor, message: Failure) -> None:
    """L2, L6: the calls of a replica's shards meet, whatever was forgotten: none is told that it is not its turn.

    But who comes back to a round when the others have been promised something in the next one has come too late.
    """
    group = world.model.groups.get(ReplicaName(actor.replica))
    late = group is not None and any(r.number > actor.round and r.key is not None for r in group.open_rounds())
    if "cannot be joined now" in message.message and not late:
        raise Violation(f"L2, L6: {actor.name} is refused: {message.message}")


def _round_of(world: World, actor: Actor) -> Round | None:
    group = world.model.groups.get(ReplicaName(actor.replica))
    return None if group is None else group.rounds.get(actor.round)
