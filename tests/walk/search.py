"""Walk breadth first: every state within the budgets, each once; the first broken law has a shortest trace."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from tests.walk import checks, rest
from tests.walk.actors import Action, Violation
from tests.walk.canon import name_of
from tests.walk.scenes import Scene
from tests.walk.steps import actions, take
from tests.walk.world import World, new_world


@dataclass
class Found:
    """What a walk came to. `trace` leads to the first broken law; empty `broken`: there is none."""

    scene: Scene
    states: int = 0
    transitions: int = 0
    depth: int = 0
    took_s: float = 0.0
    rests: int = 0
    whole: bool = True
    """Every state was visited."""
    broken: str = ""
    trace: list[Action] = field(default_factory=list)

    def __str__(self) -> str:
        """Return a line for people."""
        size = f"{self.states:,} states, {self.transitions:,} transitions, depth {self.depth}, {self.rests:,} at rest"
        return f"{self.scene}\n    {size}, {self.took_s:.1f} s{'' if self.whole else ', cut off'}"


def walk(
    scene: Scene,
    most_states: int | None = None,
    clock: Callable[[], float] = time.perf_counter,
    check_rest: bool = True,
) -> Found:
    """Visit every state of a scene, or stop after `most_states`, or at the first broken law."""
    found, began_s = Found(scene), clock()
    start = new_world(scene)
    name = name_of(start)
    parents: dict[bytes, tuple[bytes, Action] | None] = {name: None}
    level = [(name, start)]
    while level and not found.broken:
        ahead: list[tuple[bytes, World]] = []
        for here, world in level:
            found.broken, action = expand(found, here, world, parents, ahead, check_rest)
            if found.broken:
                found.trace = trace_to(parents, here) + ([] if action is None else [action])
                break
            if most_states is not None and len(parents) > most_states:
                found.whole, ahead = False, []
                break
        level = ahead
        found.depth += bool(level)
    found.states, found.took_s = len(parents), clock() - began_s
    return found


def expand(
    found: Found,
    here: bytes,
    world: World,
    parents: dict[bytes, tuple[bytes, Action] | None],
    ahead: list[tuple[bytes, World]],
    check_rest: bool,
) -> tuple[str, Action | None]:
    """Visit what follows a state; returns the first broken law and the action that breaks it."""
    choices = list(actions(world))
    for action in choices:
        found.transitions += 1
        try:
            after = take(world, action)
        except Violation as violation:
            return str(violation), action
        name = name_of(after)
        if name in parents:
            continue
        parents[name] = (here, action)
        broken = checks.of_state(after)
        if broken:
            return broken[0], action
        ahead.append((name, after))
    if check_rest and rest.is_quiet(choices):
        found.rests += 1
        broken_text = rest.check(world)
        if broken_text:
            return broken_text, None
    return "", None


def trace_to(parents: dict[bytes, tuple[bytes, Action] | None], name: bytes) -> list[Action]:
    """Return the actions that lead to a state."""
    trace: list[Action] = []
    while (step := parents[name]) is not None:
        name, action = step
        trace.append(action)
    return trace[::-1]
