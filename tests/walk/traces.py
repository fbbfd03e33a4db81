"""Write a trace for people: what happens, and what it comes to."""

from __future__ import annotations

from tests.walk.actors import GARBAGE, SEGMENTS, Action, Actor, Violation
from tests.walk.search import Found
from tests.walk.steps import take
from tests.walk.world import World, new_world

_TEXT = {
    "hello": "says hello again",
    "wake": "is heard again",
    "again": "sends its {more} again",
    "offload": "makes an offload copy",
    "offload fails": "has no room for an offload copy",
    "unpublish": "unpublishes",
    "withdraw": "takes its old copy back",
    "unstage": "discards what it has staged",
    "publish": "publishes version {more}",
    "hear": "hears that its round is {more}",
    "join": "joins its next round ({more})",
    "rejoin": "joins again, with what it was promised",
    "fill": "begins to fill its memory",
    "read": "reads the next segment from {more}",
    "relocate": "asks for another source",
    "done": "is done",
    "doubt": "leaves its sources, which are {more}, for others",
    "hand over": "wants to leave, and hands over",
    "leave": "gives its round up",
    "crash": "dies",
    "start again": "is started again",
    "suspect": "is silent for a lease",
    "bury": "is silent for so long that it is given up",
    "lose connection": "loses its connection",
    "nobody joins": "round: the deadline for joining passes",
    "nobody relocates": "round: the deadline for another source passes",
}

_OF_TIME = {
    "restart": "the server starts again",
    "end of grace": "the server has listened long enough",
    "delay": "the seed agents have not come on for too long",
}


def render(found: Found) -> str:
    """Return the trace of what a walk found, a line for each step, and then what is broken."""
    world = new_world(found.scene)
    lines = [str(found.scene), ""]
    for number, action in enumerate(found.trace, 1):
        lines.append(f"{number:3}  {say(world, action)}")
        before = [_shape(a) for a in world.actors]
        try:
            world = take(world, action)
        except Violation:
            break
        after = zip(world.actors, before, strict=True)
        lines += [f"       {a.name}: {_shape(a)}" for a, was in after if _shape(a) != was]
    return "\n".join([*lines, "", f"broken: {found.broken}", ""])


def say(world: World, action: Action) -> str:
    """Return an action as a sentence."""
    verb, place, more = action
    if place < 0:
        return _OF_TIME[verb]
    return f"{world.actors[place].name} {_TEXT[verb].format(more=more)}"


def _shape(a: Actor) -> str:
    """Return what a process has and believes."""
    if not a.alive:
        return "dead"
    parts = [a.phase if a.promised == 0 else f"{a.phase} version {a.promised % 100}"]
    parts += [f"holds version {a.held % 100}"] if a.held else []
    parts += ["draining"] if a.draining else []
    cells = ["-" if cell == GARBAGE else str(cell % 100) for cell in a.cells]
    parts += [f"memory {' '.join(cells)}"] if any(a.cells) else []
    if any(a.staged_cells):
        parts.append("staging " + " ".join("-" if c == GARBAGE else str(c % 100) for c in a.staged_cells))
    parts += [f"offload copy of version {code % 100}" for code in sorted(a.offloads)]
    parts += [f"has read {a.verified} of {SEGMENTS}"] if a.verified else []
    return ", ".join(parts)
