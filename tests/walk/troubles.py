"""How processes, connections and the server fail, and what time brings about."""

from __future__ import annotations

from collections.abc import Iterator

from tensorhub_core.ids import SessionId
from tensorhub_core.state.events import Disconnected
from tests.walk import checks, zones
from tests.walk.actors import Action, Actor
from tests.walk.world import NOW, World, new_server


def faults(world: World, actor: Actor) -> Iterator[Action]:
    """Yield what may happen to a process."""
    scene, worker = world.scene, world.known(actor)
    if not actor.alive:
        if actor.phase != "over":
            if worker is not None and not worker.suspected:
                yield ("suspect", actor.place, "")
            yield ("start again", actor.place, "")
        if worker is not None:
            yield ("bury", actor.place, "")
        return
    if scene.crashes:
        yield ("crash", actor.place, "")
    if worker is None:
        return
    if scene.suspicions and not worker.suspected:
        yield ("suspect", actor.place, "")
    if scene.burials:
        yield ("bury", actor.place, "")
    if scene.losses and world.worker(actor) is not None:
        yield ("lose connection", actor.place, "")


def do_crash(world: World, actor: Actor, _: str) -> None:
    """Die; nobody hears of it."""
    world.spend("crashes")
    world.failed = True
    actor.alive = False


def do_start_again(world: World, actor: Actor, _: str) -> None:
    """Start a new process in the place of one that died; a trainer goes on where the others are."""
    peers = [a.last for a in world.group(actor) if a is not actor]
    new = world.birth(actor.place, actor.replica, actor.shard, actor.is_source)
    new.last = max(0, max(peers, default=actor.last) - 1)


def do_suspect(world: World, actor: Actor, _: str) -> None:
    """Be silent for longer than a lease."""
    if actor.alive:
        world.spend("suspicions")
    _age(world, actor, world.server.config.lease_s)


def do_bury(world: World, actor: Actor, _: str) -> None:
    """Be silent for so long that the server gives one up."""
    if actor.alive:
        world.spend("burials")
        world.failed = True
    _age(world, actor, world.server.config.dead_after_s)


def _age(world: World, actor: Actor, silent_s: float) -> None:
    worker = world.known(actor)
    assert worker is not None
    worker.last_seen_s = NOW - silent_s
    world.tick()
    worker.last_seen_s = NOW


def do_lose_connection(world: World, actor: Actor, _: str) -> None:
    """Lose what was under way to a process; it says hello again."""
    world.spend("losses")
    actor.lost.clear()
    actor.aborted = actor.committed = False
    world.feed(Disconnected(actor.session))
    actor.session = SessionId(actor.session + b"+")


# --- what time and the server bring about ---------------------------------------------------------------------------


def of_time(world: World) -> Iterator[Action]:
    """Yield the deadlines of the server that may pass, and its own end."""
    if world.scene.restarts:
        yield ("restart", -1, "")
    if not world.listened and may_end_grace(world):
        yield ("end of grace", -1, "")
    if world.scene.delays and zones.may_be_late(world):
        yield ("delay", -1, "")
    if world.scene.leaves:
        yield from deadlines(world)


def may_end_grace(world: World) -> bool:
    """Tell whether the grace may end: a process that is not silent has said hello by then."""
    late = [a for a in world.actors if a.alive and world.worker(a) is None]
    return len(late) <= world.scene.suspicions


def deadlines(world: World) -> Iterator[Action]:
    """Yield rounds that somebody has not joined, or in which somebody looks for no other source."""
    for group in world.model.groups.values():
        current = group.open_round()
        if current is None:
            continue
        place = next(a.place for a in world.actors if a.replica == group.replica)
        if current.join_by_s is not None and len(current.joined) < group.num_shards:
            yield ("nobody joins", place, "")
        if any(joined.orphaned_since_s is not None for joined in current.joined.values()):
            yield ("nobody relocates", place, "")


def do_deadline(world: World, actor: Actor, _: str) -> None:
    """Let the deadlines of a replica's round pass."""
    world.spend("leaves")
    current = world.model.groups[actor.replica].open_round()  # type: ignore[index]
    assert current is not None
    current.join_by_s = None if current.join_by_s is None else NOW
    for joined in current.joined.values():
        if joined.orphaned_since_s is not None:
            joined.orphaned_since_s = NOW - 2 * world.server.config.dead_after_s
    world.tick()


def do_restart(world: World) -> None:
    """Start the server again; it knows nothing."""
    world.spend("restarts")
    world.failed = world.failed or any(a.committed for a in world.actors)
    for actor in world.actors:
        for lease, (life, which, prefix, _) in list(actor.sources.items()):
            if lease not in world.server.leases:
                actor.sources[lease] = (life, which, prefix, checks.ENDED)
    world.server = new_server(world.scene, world.server.config.server_epoch + 1)


def do_delay(world: World) -> None:
    """Let the time pass that a zone waits for agents which do not come on."""
    world.spend("delays")
    for lead in world.model.leads.values():
        lead.since_s = NOW - world.server.config.agent_within_s
    world.tick()


def do_end_grace(world: World) -> None:
    """Let the grace of the server pass; who has not come back by then has been silent for a lease."""
    for actor in world.actors:
        if actor.alive and world.worker(actor) is None:
            world.spend("suspicions")
    server = world.server
    server.listen_from_s = NOW - server.config.grace_s
    server.now_s = NOW - 0.001
    world.tick()
