"""What the readers' zone may see while a seed agent lives in it; the sources are in none."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tensorhub_core.state.records import CopyState

if TYPE_CHECKING:
    from tests.walk.actors import Actor
    from tests.walk.world import World

ZONE = "east"


def note_brought(world: World) -> None:
    """Remember the newest version that was whole at some replica of the zone."""
    for replica in {a.replica for a in world.actors if not a.is_source} if world.scene.agents else ():
        codes = [100 * e + n for e, n in world.model.versions if offers(world, replica, 100 * e + n)]
        world.brought = max([world.brought, *codes])


def offers(world: World, replica: str, code: int) -> bool:
    """Tell whether the server knows that all shards of a replica publish a version, and that they live."""
    group = world.model.groups.get(replica)  # type: ignore[call-overload]
    workers = [] if group is None else [world.server.workers[i] for i in group.members.values()]
    offered = [w.copy is not None and w.copy.key == divmod(code, 100) for w in workers if not w.suspected]
    published = all(w.copy is not None and w.copy.state is CopyState.PUBLISHED for w in workers)
    return len(offered) == world.scene.shards and all(offered) and published


def agent_lives(world: World) -> bool:
    """Tell whether there is an agent of which no worker is silent."""
    for replica in {a.replica for a in world.actors if a.seeds}:
        group = world.model.groups.get(replica)  # type: ignore[call-overload]
        workers = [] if group is None else [world.server.workers[i] for i in group.members.values()]
        if len(workers) == world.scene.shards and not any(w.suspected for w in workers):
            return True
    return False


def may_be_late(world: World) -> bool:
    """Tell whether the zone may be told to go on without its agents: they are here, and do not bring something."""
    lead = world.model.leads.get(ZONE)
    high = 0 if world.model.high is None else 100 * world.model.high[0] + world.model.high[1]
    return lead is not None and not lead.late and world.brought < high and agent_lives(world)


def held_back(world: World, actor: Actor, newest: int) -> bool:
    """Tell whether the newest version is not to be seen by a reader yet."""
    lead = world.model.leads.get(ZONE)
    if lead is None or actor.is_source or actor.seeds or world.brought >= newest:
        return False
    return agent_lives(world) and not lead.late


def newest_for(world: World, actor: Actor, newest: int) -> int:
    """Return the version that a reader has to get, if the newest one that there is, is this."""
    if not held_back(world, actor, newest):
        return newest
    there = any(offers(world, a.replica, world.brought) for a in world.actors if not a.is_source)
    return max(world.brought if there else 0, *(a.high for a in world.group(actor)))


def waits_in_vain(world: World) -> list[str]:
    """L10: nobody in the zone waits for the newest version when no agent that lives is about to bring it."""
    newest = 0 if world.model.high is None else 100 * world.model.high[0] + world.model.high[1]
    found = []
    for actor in world.actors if world.scene.agents else ():
        group = world.model.groups.get(actor.replica)  # type: ignore[call-overload]
        current = None if group is None else group.open_round()
        others = {a.replica for a in world.actors} - {actor.replica}
        if current is None or current.key is not None or current.want is not None or held_back(world, actor, newest):
            continue
        joined = all(a.alive and a.phase == "joining" and world.worker(a) is not None for a in world.group(actor))
        silent = any(w is not None and w.suspected for w in map(world.worker, world.group(actor)))
        if joined and not silent and not current.avoid and any(offers(world, r, newest) for r in others):
            found.append(f"L10: {actor.name} waits for version {newest}, and no agent is about to bring it")
    return found
