"""Everything that may happen next, and how it is done."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from tensorhub_core.state.messages import Heartbeat
from tests.walk import hearing
from tests.walk.actors import Action, Actor
from tests.walk.moves import (
    do_again,
    do_begin,
    do_done,
    do_doubt,
    do_fill,
    do_hand_over,
    do_hear,
    do_join,
    do_leave,
    do_look,
    do_offload,
    do_offload_fails,
    do_publish,
    do_read,
    do_rejoin,
    do_relocate,
    of_process,
    reads,
)
from tests.walk.troubles import (
    do_bury,
    do_crash,
    do_deadline,
    do_delay,
    do_end_grace,
    do_lose_connection,
    do_restart,
    do_start_again,
    do_suspect,
    faults,
    of_time,
)
from tests.walk.world import World

GOES_ON = (
    "hello",
    "again",
    "rejoin",
    "hear",
    "wake",
    "withdraw",
    "begin",
    "fill",
    "read",
    "relocate",
    "done",
    "offload",
)
"""What everybody does by itself, sooner or later."""


def actions(world: World) -> Iterator[Action]:
    """Yield everything that may happen."""
    if world.scene.eager:
        soon = next((action for actor in world.actors for action in reads(world, actor)), None)
        if soon is not None:
            yield soon
            return
    for actor in world.actors:
        yield from of_process(world, actor)
        yield from faults(world, actor)
    yield from of_time(world)


def _take_back(world: World, actor: Actor, _: str) -> None:
    hearing.take_back(world, actor)


def _wake(world: World, actor: Actor, _: str) -> None:
    world.ask(actor, "told", Heartbeat())


_VERBS: dict[str, Callable[[World, Actor, str], None]] = {
    "hello": lambda world, actor, _: world.hello(actor),
    "wake": _wake,
    "again": do_again,
    "offload": do_offload,
    "offload fails": do_offload_fails,
    "unpublish": _take_back,
    "withdraw": _take_back,
    "unstage": lambda world, actor, _: hearing.unstage(world, actor),
    "publish": do_publish,
    "hear": do_hear,
    "join": do_join,
    "rejoin": do_rejoin,
    "fill": do_fill,
    "begin": do_begin,
    "read": do_read,
    "look": do_look,
    "relocate": do_relocate,
    "done": do_done,
    "doubt": do_doubt,
    "hand over": do_hand_over,
    "leave": do_leave,
    "crash": do_crash,
    "start again": do_start_again,
    "suspect": do_suspect,
    "bury": do_bury,
    "lose connection": do_lose_connection,
    "nobody joins": do_deadline,
    "nobody relocates": do_deadline,
}


def take(world: World, action: Action) -> World:
    """Return the world after an action; raises Violation."""
    after = world.clone()
    verb, place, more = action
    if verb == "restart":
        do_restart(after)
    elif verb == "delay":
        do_delay(after)
    elif verb == "end of grace":
        do_end_grace(after)
    else:
        _VERBS[verb](after, after.actors[place], more)
    return after
