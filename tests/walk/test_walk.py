"""The walk itself: every scene of CI, and what a walk has to be for its silence to mean anything."""

from __future__ import annotations

import dataclasses

import pytest

from tensorhub_core.state import records
from tests.walk import canon
from tests.walk.clone import SHARED, clone
from tests.walk.rest import settle
from tests.walk.scenes import CI, Scene
from tests.walk.search import walk
from tests.walk.steps import actions, take
from tests.walk.traces import render
from tests.walk.world import World, new_world

LEAST_STATES = 100


@pytest.mark.timeout(600)
@pytest.mark.parametrize("scene", CI, ids=lambda scene: scene.name.replace(" ", "-"))
def test_every_state_keeps_the_laws(scene: Scene) -> None:
    found = walk(scene)
    print(found)
    assert not found.broken, render(found)
    assert found.whole
    assert found.states > LEAST_STATES, "a scene in which nothing happens proves nothing"
    assert found.rests, "somewhere everybody waits"


def follow(scene: Scene, verbs: list[tuple[str, int]]) -> World:
    """Return the world after the first action of each verb and place."""
    world = new_world(scene)
    for verb, place in verbs:
        action = next(a for a in actions(world) if a[:2] == (verb, place))
        world = take(world, action)
    return world


def busy_world() -> World:
    """A world with copies in every kind of state, leases, rounds and offload copies."""
    scene = Scene("busy", sources=1, readers=2, shards=1, queues=True, retain=1)
    begun = [("publish", 0), ("unpublish", 0), ("offload", 0), ("publish", 0)]
    return follow(scene, [*begun, ("join", 1), ("fill", 1), ("read", 1), ("join", 2), ("unpublish", 0)])


def test_a_copy_of_a_state_shares_nothing_that_the_machine_changes() -> None:
    old = busy_world().server
    new = clone(old)
    assert new == old
    seen: list[tuple[object, object]] = [(old, new)]
    kinds = set()
    while seen:
        a, b = seen.pop()
        if dataclasses.is_dataclass(a) and not isinstance(a, type):
            if type(a).__dataclass_params__.frozen or isinstance(a, SHARED):  # type: ignore[attr-defined]
                continue
            kinds.add(type(a).__name__)
            seen += [(getattr(a, f.name), getattr(b, f.name)) for f in dataclasses.fields(a)]
        elif isinstance(a, dict):
            assert isinstance(b, dict)
            seen += [(a[key], b[key]) for key in a]
        elif isinstance(a, list):
            assert isinstance(b, list)
            seen += list(zip(a, b, strict=True))
        elif not isinstance(a, set):
            continue
        assert a is not b, f"{type(a).__name__} is shared: {a}"
    assert kinds >= {
        "ServerState",
        "ModelState",
        "Group",
        "Worker",
        "Copy",
        "Lease",
        "Round",
        "Joined",
        "VersionRecord",
    }


def test_states_that_differ_only_in_ids_are_one() -> None:
    scene = Scene("same", sources=2, readers=1, shards=2)
    one = follow(scene, [("publish", 0), ("publish", 1), ("publish", 2)])
    same = follow(scene, [("publish", 3), ("publish", 1), ("publish", 0)])
    mirrored = follow(scene, [("publish", 2), ("publish", 3), ("publish", 1)])
    other = follow(scene, [("publish", 0), ("publish", 1)])
    assert canon.name_of(one) == canon.name_of(mirrored)
    assert canon.name_of(one) != canon.name_of(other)
    assert canon.name_of(same) != canon.name_of(other)


def test_an_action_leaves_the_world_before_it_as_it_was() -> None:
    world = busy_world()
    name, server = canon.name_of(world), clone(world.server)
    for action in actions(world):
        take(world, action)
        assert (canon.name_of(world), world.server) == (name, server), action


IGNORED = {
    "ServerState": "models config started_s now_s listen_from_s buried_s counter sessions blobs blob_bytes ticked_s "
    "swept_s reachability draining offloads tickets known_bytes flows",
    "ModelState": "name stream streams created calling waiting holders finished retain handovers stuck drains "
    "offloads_made offloads_dropped index",
    "Group": "model replica generation num_shards zone host spot keeper seeds retired next_round place",
    "Round": "told_slow told_late tried details number resumed held_since_s",
    "Joined": "offer session done_sums",
    "Worker": "id session token model replica shard observer stream creates_in last_seen_s room_bytes ended tickets "
    "announces_sums casts zone host rail seat waits has",
    "Copy": "id worker memory done_bytes started_s speed draining_since_s origin sums converted advanced_s route",
    "Lease": "id reader round tickets since_s egress ingress crosses",
    "Keeping": "firm",
    "Lead": "since_s agents",
    "VersionRecord": "total_bytes keeping",
}
"""What does not tell states apart: identities, times, counts, what follows from others, what no scene uses
(questions for sums, conversions, machines and who cannot reach whom), and which blobs need not be sent again."""


@pytest.mark.parametrize("kind", IGNORED)
def test_every_field_that_matters_is_part_of_a_states_name(kind: str) -> None:
    source = canon.__spec__ and canon.__spec__.loader.get_source(canon.__name__)  # type: ignore[attr-defined,union-attr]
    assert source
    names = {f.name for f in dataclasses.fields(getattr(records, kind))}
    ignored = set(IGNORED[kind].split())
    assert ignored <= names, f"{kind} has no {sorted(ignored - names)} any more"
    missing = {name for name in names - ignored if f".{name}" not in source}
    assert not missing, f"name {sorted(missing)} of {kind} in tests/walk/canon.py, or say why not"


def test_time_answers_everybody() -> None:
    world = settle(busy_world())
    assert not any(actor.open for actor in world.actors)
