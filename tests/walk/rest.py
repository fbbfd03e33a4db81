"""Nobody waits for ever: when everybody only waits, time answers every open request.

From a state in which nobody has anything to do, time passes: silent processes are buried, deadlines of the server pass,
and everybody goes on with what it has begun, but begins nothing new. At the end nothing may be open that somebody was
bound to answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from tests.walk.actors import Action, Actor, Violation
from tests.walk.steps import GOES_ON, actions, take
from tests.walk.troubles import deadlines
from tests.walk.world import World

_MOST_STEPS = 400
_BUDGETS = {
    "leaves": 99,
    "delays": 99,
    "doubts": 0,
    "departures": 0,
    "refusals": 0,
    "crashes": 0,
    "suspicions": 0,
    "burials": 0,
    "losses": 0,
    "restarts": 0,
}


def is_quiet(choices: Sequence[Action]) -> bool:
    """Tell whether nobody has anything to go on with."""
    return not any(verb in GOES_ON for verb, _, _ in choices)


def check(world: World) -> str:
    """Let time pass; returns who waits for ever, or an empty text."""
    if not any(_waits(a) for a in world.actors):
        return ""
    try:
        world = settle(world)
    except Violation as violation:
        return f"while time passes: {violation}"
    stuck = [
        f"{a.name} ({', '.join(sorted(a.open.values()))})" for a in world.actors if a.alive and not _may_wait(world, a)
    ]
    return f"no answer ever comes: {', '.join(stuck)}" if stuck else ""


def settle(world: World) -> World:
    """Return the world in which nothing happens any more by itself."""
    world = world.clone()
    world.scene = replace(world.scene, **_BUDGETS)
    ticked = False
    for _ in range(_MOST_STEPS):
        by_itself = [action for action in actions(world) if action[0] in GOES_ON]
        of_time = [action for action in actions(world) if action[0] in ("bury", "end of grace", "delay")]
        following = by_itself or of_time or list(deadlines(world))
        if not following and ticked:
            return world
        if following:
            world, ticked = take(world, following[0]), False
        else:
            world.tick()
            ticked = True
    raise Violation("it never comes to rest")


def _waits(actor: Actor) -> bool:
    return actor.alive and bool(actor.open)


def _may_wait(world: World, actor: Actor) -> bool:
    """Tell whether a process waits for nothing, or for what nobody here is bound to do."""
    if not actor.open:
        return True
    if "handover" in actor.open.values():
        return True  # it leaves after a while, whatever the answer
    if set(actor.open.values()) != {"join"}:
        return False
    group = world.group(actor)
    if any(not a.alive or world.worker(a) is None for a in group):
        return True
    whole = [key for key, record in world.model.versions.items() if record.was_whole]
    return not whole if actor.want is None else all(number != actor.want for _, number in whole)
