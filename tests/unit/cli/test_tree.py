"""The tree of who reads from whom that `tensorhub status` draws: its shape, and how much of it is shown."""

from __future__ import annotations

import pytest
from rich.console import Console

from tensorhub_core.cli import tree
from tensorhub_core.cli.status import render
from tensorhub_core.cli.tree import Line, Node
from tensorhub_core.state.messages import (
    FillStatus,
    ModelStatus,
    PlaceStatus,
    ReplicaStatus,
    ShardStatus,
    SourceStatus,
    StatusReply,
)

BYTES = 1000


class Fleet:
    """Replicas by name, as the server describes them."""

    def __init__(self) -> None:
        self.replicas: dict[str, ReplicaStatus] = {}
        self.holds("trainer", "west", "w0")

    def holds(self, name: str, zone: str = "west", host: str = "", version: int = 2, state: str = "published") -> None:
        shard = ShardStatus(0, version, state, 0, BYTES, None, 0.0, PlaceStatus(zone, host))
        self.replicas[name] = ReplicaStatus(name, zone, host, False, version, state, (shard,))

    def reads(
        self,
        name: str,
        *sources: str,
        zone: str = "west",
        host: str = "",
        done_bytes: int = 400,
        state: str = "filling",
        seeds: bool = False,
        **more: bool,
    ) -> None:
        """Add a replica that gets version 2; it begins with its first byte."""
        found = []
        for source in sources:
            place = self.replicas[source].shards[0].place if source in self.replicas else PlaceStatus()
            found.append(SourceStatus(source, 0, place, place.zone != zone))
        fills = FillStatus(2, done_bytes > 0, done_bytes, BYTES, 10.0 * (done_bytes > 0), **more)
        shard = ShardStatus(0, 1, state, 0, BYTES, None, 0.0, PlaceStatus(zone, host), tuple(found), fills)
        self.replicas[name] = ReplicaStatus(name, zone, host, False, 1, state, (shard,), seeds)

    def model(self) -> ModelStatus:
        return ModelStatus("policy", None, 1, 2, (), tuple(self.replicas[name] for name in sorted(self.replicas)))

    def roots(self) -> tuple[Node, ...]:
        (found,) = tree.trees_of(self.model())
        assert found.version == 2
        return found.roots

    def lines(self, **bounds: int) -> list[Line]:
        (found,) = tree.trees_of(self.model())
        return tree.lines_of(found, **bounds)

    def printed(self) -> list[str]:
        console = Console(width=200, color_system=None)
        with console.capture() as capture:
            console.print(render("tcp://a:1", StatusReply(1, 2.0, (self.model(),))))
        lines = capture.get().splitlines()
        return [line.rstrip() for line in lines[lines.index("version 2: 2 reading") :]]


def shape(nodes: tuple[Node, ...] | list[Node]) -> dict[str, object]:
    return {node.replica: shape(node.children) for node in nodes}


def names_of(lines: list[Line]) -> list[object]:
    """Return replicas by name, places with what stands below them, and how many are folded."""
    found: list[object] = []
    for line in lines:
        if line.node is not None:
            found += [line.node.replica, *([below] if (below := names_of(line.children)) else [])]
        else:
            found += [line.folded.total()] if line.folded else [(line.place, line.wan, names_of(line.children))]
    return found


def test_a_star() -> None:
    fleet = Fleet()
    for name in "abc":
        fleet.reads(name, "trainer")
    assert shape(fleet.roots()) == {"trainer": {"a": {}, "b": {}, "c": {}}}


def test_a_chain() -> None:
    fleet = Fleet()
    for before, name in (("trainer", "a"), ("a", "b"), ("b", "c")):
        fleet.reads(name, before)
    assert shape(fleet.roots()) == {"trainer": {"a": {"b": {"c": {}}}}}


def test_two_zones_with_a_seed() -> None:
    fleet = Fleet()
    fleet.reads("agent", "trainer", zone="east", host="e0", seeds=True)
    fleet.reads("far", "agent", zone="east", host="e1")
    fleet.reads("near", "trainer", host="w1")
    (west,) = fleet.lines()
    east = ("zone east", True, ["agent", ["far"]])
    assert names_of([west]) == [("zone west", False, ["trainer", ["near", east]])]


def test_readers_on_one_machine_stand_together() -> None:
    fleet = Fleet()
    for index in range(4):
        fleet.reads(f"r{index}", "trainer", host=f"w{1 + index // 2}")
    fleet.reads("own", "trainer", host="w0")
    fleet.reads("alone", "trainer", host="w9")
    ((_, _, below),) = names_of(fleet.lines())  # type: ignore[misc]
    places = [("host w1", False, ["r0", "r1"]), ("host w2", False, ["r2", "r3"])]
    assert below == ["trainer", ["alone", "own", *places]]


@pytest.mark.parametrize(
    ("more", "state"),
    [
        ({"done_bytes": 0}, "about to begin"),
        ({}, "filling"),
        ({"staged": True, "state": "published"}, "staging"),
        ({"late": True}, "late"),
        ({"state": "suspected", "late": True}, "suspected"),
        ({"state": "draining", "done_bytes": 0}, "draining"),
    ],
)
def test_what_a_reader_does(more: dict[str, object], state: str) -> None:
    fleet = Fleet()
    fleet.reads("a", "trainer", **more)  # type: ignore[arg-type]
    ((reader,),) = [node.children for node in fleet.roots()]
    assert (reader.state, reader.done_bytes) == (state, more.get("done_bytes", 400))


def test_a_source_that_drains() -> None:
    fleet = Fleet()
    fleet.holds("trainer", state="draining")
    fleet.reads("a", "trainer")
    (source,) = fleet.roots()
    assert (source.state, shape([source])) == ("draining", {"trainer": {"a": {}}})


def test_who_holds_another_version_or_reads_nothing_is_not_in_it() -> None:
    fleet = Fleet()
    fleet.holds("old", version=1)
    fleet.reads("a", "trainer")
    fleet.holds("idle holder")
    assert shape(fleet.roots()) == {"trainer": {"a": {}}, "idle holder": {}}
    del fleet.replicas["a"]
    assert tree.trees_of(fleet.model()) == []


def test_one_of_several_sources_that_is_near_comes_first() -> None:
    fleet = Fleet()
    fleet.holds("copy", zone="east")
    fleet.reads("a", "trainer", "copy", zone="east")
    (reader,) = next(node for node in fleet.roots() if node.replica == "copy").children
    assert [(edge.replica, edge.wan) for edge in reader.sources] == [("copy", False), ("trainer", True)]


def test_the_shards_of_a_replica_are_one_node() -> None:
    fleet = Fleet()
    fills = (FillStatus(2, True, 100, BYTES, 1.0), FillStatus(2, False, 0, BYTES))
    shards = tuple(
        ShardStatus(k, 1, "filling", 0, BYTES, None, 0.0, PlaceStatus("west", f"h{k}"), (source,), fills[k])
        for k, source in enumerate([SourceStatus("trainer", 0), SourceStatus("trainer", 1)])
    )
    fleet.replicas["big"] = ReplicaStatus("big", "west", "h0", False, None, "filling", shards)
    ((reader,),) = [node.children for node in fleet.roots()]
    assert (reader.done_bytes, reader.total_bytes, reader.hosts) == (100, 2 * BYTES, ("h0", "h1"))


def test_a_source_that_is_not_known_is_there_by_its_name() -> None:
    fleet = Fleet()
    fleet.reads("a", "somebody")
    assert shape(fleet.roots()) == {"somebody": {"a": {}}, "trainer": {}}


def test_a_circle_is_cut() -> None:
    fleet = Fleet()
    for name, source in (("a", "c"), ("b", "a"), ("c", "b"), ("d", "a"), ("e", "e")):
        fleet.reads(name, source)
    assert shape(fleet.roots()) == {"trainer": {}, "a": {"b": {"c": {}}, "d": {}}, "e": {}}


def count(lines: list[Line]) -> tuple[int, int]:
    """Return how many lines there are, and for how many replicas they stand."""
    number = replicas = 0
    ahead = list(lines)
    while ahead:
        line = ahead.pop()
        number += 1
        replicas += line.folded.total() if line.node is None else 1
        ahead += line.children
    return number, replicas


@pytest.mark.parametrize("form", ["star", "chain", "many sources", "binary"])
def test_a_thousand_readers_take_a_bounded_number_of_lines(form: str) -> None:
    fleet = Fleet()
    sources = {"star": lambda k: 0, "chain": lambda k: k, "many sources": lambda k: 0, "binary": lambda k: k // 2}
    names = ["trainer", *(f"r{k:04}" for k in range(1000))]
    for k, name in enumerate(names[1:]):
        source = names[sources[form](k)]
        if form == "many sources":
            fleet.holds(f"holder {k}", zone=f"z{k % 7}")
            source = f"holder {k}"
        fleet.reads(name, source, zone=f"z{k % 7}", host=f"h{k // 8}", done_bytes=k % 2)
    lines = fleet.lines()
    number, replicas = count(lines)
    assert replicas == len(fleet.replicas), "every one is counted, once"
    assert number <= 3 * tree.MOST_LINES
    assert len(fleet.lines(children=2, depth=2, most=5)) < 10


def test_what_is_printed() -> None:
    fleet = Fleet()
    fleet.holds("copy", zone="east")
    fleet.reads("agent", "trainer", zone="east", host="e0", seeds=True)
    fleet.reads("a", "agent", "trainer", zone="east", done_bytes=0, late=True)
    waits = fleet.replicas["copy"].shards
    fleet.replicas["w"] = ReplicaStatus("w", "east", "", False, 1, "idle", waits[:0], False, "latest")
    assert fleet.printed() == [
        "version 2: 2 reading",
        "├── zone west",
        "│   └── trainer  [w0]  published",
        "│       └── zone east  over the WAN",
        "│           └── agent (seed agent)  [e0]  filling  40% of 1.0 kB  10 bytes/s",
        "│               └── a  late  0% of 1.0 kB  also from trainer over the WAN",
        "└── zone east",
        "    └── copy  published",
        "waiting for latest: w",
        "late, nobody waits for them: a",
    ]


def test_many_names_are_cut() -> None:
    assert tree.names([f"r{k}" for k in range(40)], 3) == "r0, r1, r2 and 37 more"
    assert tree.names(["a", "b"]) == "a, b"
