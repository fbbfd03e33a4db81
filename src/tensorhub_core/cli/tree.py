"""Who reads from whom, as a tree: made from the server's status by pure functions, folded to a bounded size.

A replica stands below the one in its zone that most of its shards read from, else below one elsewhere. Replicas of
another zone than the one they stand below have a line of their own that names it; so do several on one machine.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from tensorhub_core.state.messages import ModelStatus, ReplicaStatus, ShardStatus

MOST_CHILDREN = 6
"""Lines below one line, before the rest is counted."""
MOST_DEPTH = 12
MOST_LINES = 60
"""Lines of one version; which replicas they name is decided from the top."""
MOST_NAMES = 6
_LOUDEST = ("suspected", "late", "draining", "dirty", "filling", "staging", "about to begin", "offload", "published")


@dataclass(frozen=True, slots=True)
class Edge:
    """A replica that is being read. `wan`: by one in another zone."""

    replica: str
    wan: bool = False


@dataclass(slots=True)
class Node:
    """One replica in the tree of one version. `sources`: whom it reads from, first the one that it stands below."""

    replica: str
    zone: str
    hosts: tuple[str, ...]
    state: str
    seeds: bool = False
    done_bytes: int = 0
    total_bytes: int = 0
    bytes_per_s: float = 0.0
    sources: tuple[Edge, ...] = ()
    children: list[Node] = field(default_factory=list)

    @property
    def host(self) -> str:
        """Return its machine, if it has but one."""
        return self.hosts[0] if len(self.hosts) == 1 else ""


@dataclass(slots=True)
class Line:
    """One line: a replica, a group of them at one place, or what was left out (`folded` replicas, by state)."""

    node: Node | None = None
    place: str = ""
    wan: bool = False
    folded: Counter[str] = field(default_factory=Counter)
    children: list[Line] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class VersionTree:
    """The replicas that hold or get one version; `roots` read from nobody."""

    version: int
    roots: tuple[Node, ...]
    readers: int


def trees_of(model: ModelStatus) -> list[VersionTree]:
    """Return the tree of every version that somebody reads or is promised, newest first."""
    getting: dict[int, list[ReplicaStatus]] = {}
    for replica in model.replicas:
        for version in sorted({shard.fills.version for shard in replica.shards if shard.fills is not None}):
            getting.setdefault(version, []).append(replica)
    return [_tree(model, version, getting[version]) for version in sorted(getting, reverse=True)]


def waiting(model: ModelStatus) -> dict[str, list[str]]:
    """Return which replicas wait for what, without a promise yet."""
    found: dict[str, list[str]] = {}
    for replica in model.replicas:
        if replica.waits_for is not None:
            found.setdefault(replica.waits_for, []).append(replica.replica)
    return found


def late(model: ModelStatus) -> list[str]:
    """Return the replicas for which others do not wait any more."""
    return [r.replica for r in model.replicas if any(s.fills is not None and s.fills.late for s in r.shards)]


def names(found: Sequence[str], most: int = MOST_NAMES) -> str:
    """Return names in one line, the first ones if there are many."""
    more = len(found) - most
    return ", ".join(found[:most]) + (f" and {more:,} more" if more > 0 else "")


# --- a tree of nodes -----------------------------------------------------------------------------------------------


def _tree(model: ModelStatus, version: int, readers: Iterable[ReplicaStatus]) -> VersionTree:
    nodes = {replica.replica: _reader(replica, version) for replica in readers}
    count = len(nodes)
    for replica in model.replicas:
        holds = any(shard.version == version and shard.fills is None for shard in replica.shards)
        if replica.replica not in nodes and holds:
            nodes[replica.replica] = _holder(replica)
    for node in list(nodes.values()):  # a source of which no more is known than its name: it holds a staged copy
        for edge in node.sources:
            if edge.replica not in nodes:
                known = next((r for r in model.replicas if r.replica == edge.replica), None)
                nodes[edge.replica] = Node(edge.replica, "", (), "staged") if known is None else _holder(known)
    for node in nodes.values():
        if node.sources:
            nodes[node.sources[0].replica].children.append(node)
    return VersionTree(version, tuple(_roots(nodes)), count)


def _roots(nodes: Mapping[str, Node]) -> list[Node]:
    """Return what everything else stands below; cuts circles, though a status of one moment should have none."""
    roots = [nodes[name] for name in sorted(nodes) if not nodes[name].sources]
    seen = {node.replica for node in roots}
    ahead = list(roots)
    for name in [None, *sorted(nodes)]:
        if name is not None and name not in seen:
            node = nodes[name]
            above = nodes[node.sources[0].replica]
            above.children = [child for child in above.children if child is not node]
            roots.append(node)
            seen.add(name)
            ahead.append(node)
        while ahead:
            new = [child for child in ahead.pop().children if child.replica not in seen]
            seen.update(child.replica for child in new)
            ahead += new
    return roots


def _reader(replica: ReplicaStatus, version: int) -> Node:
    """Return the node of a replica that gets a version."""
    fills = [shard.fills for shard in replica.shards if shard.fills is not None and shard.fills.version == version]
    state = "about to begin"
    if any(shard.state in ("suspected", "draining") for shard in replica.shards):
        state = next(s for s in ("suspected", "draining") if any(shard.state == s for shard in replica.shards))
    elif any(fill.late for fill in fills):
        state = "late"
    elif any(fill.begun for fill in fills):
        state = "staging" if any(fill.staged for fill in fills) else "filling"
    counted: Counter[str] = Counter()
    wan = {}
    for shard in replica.shards:
        for source in {source.replica: source for source in shard.sources}.values():
            counted[source.replica] += 1
            wan[source.replica] = source.wan
    order = sorted(counted, key=lambda name: (wan[name], -counted[name], name))
    return Node(
        replica.replica,
        replica.zone,
        hosts_of(replica.shards),
        state,
        replica.seeds,
        sum(fill.done_bytes for fill in fills),
        sum(fill.total_bytes for fill in fills),
        sum(fill.bytes_per_s for fill in fills),
        tuple(Edge(name, wan[name]) for name in order),
    )


def _holder(replica: ReplicaStatus) -> Node:
    total_bytes = sum(shard.total_bytes for shard in replica.shards)
    hosts = hosts_of(replica.shards)
    return Node(replica.replica, replica.zone, hosts, replica.state, replica.seeds, total_bytes, total_bytes)


def hosts_of(shards: Iterable[ShardStatus]) -> tuple[str, ...]:
    """Return the machines of a replica's shards."""
    return tuple(sorted({shard.place.host for shard in shards if shard.place.host}))


# --- lines, as many as can be read ----------------------------------------------------------------------------------


def lines_of(
    tree: VersionTree, children: int = MOST_CHILDREN, depth: int = MOST_DEPTH, most: int = MOST_LINES
) -> list[Line]:
    """Return the lines of a version's tree, those below each other; what is too much is counted in a last line."""
    top: list[Line] = []
    left = most
    level: list[tuple[list[Line], list[Node], Node | None, int]] = [(top, list(tree.roots), None, 0)]
    while level:
        below: list[tuple[list[Line], list[Node], Node | None, int]] = []
        for lines, nodes, parent, deep in level:
            shown = children if deep < depth else 0
            rest: list[Node] = []
            for place, wan, group in _places(nodes, parent):
                into, extra = lines, bool(place)
                fits = group[: max(0, min(shown, left - extra))]
                rest += group[len(fits) :]
                shown, left = shown - len(fits), left - len(fits) - (extra if fits else 0)
                if place and fits:
                    lines.append(Line(place=place, wan=wan))
                    into = lines[-1].children
                for node in fits:
                    into.append(Line(node))
                    if node.children:
                        below.append((into[-1].children, node.children, node, deep + 1))
            if rest:
                lines.append(Line(folded=_count(rest)))
        level = below
    return top


def _places(nodes: Sequence[Node], parent: Node | None) -> list[tuple[str, bool, list[Node]]]:
    """Group replicas that read from one: its own zone first, then others by zone, in each by machine."""
    zone = None if parent is None else parent.zone
    found: dict[tuple[bool, str, str], list[Node]] = {}
    for node in _in_order(nodes):
        found.setdefault((node.zone != zone, node.zone, node.host), []).append(node)
    grouped: dict[tuple[bool, str, str], list[Node]] = {}
    for (elsewhere, where, host), group in found.items():
        alone = not host or len(group) == 1 or (parent is not None and host == parent.host)
        grouped.setdefault((elsewhere, where, "" if alone else host), []).extend(group)
    rows = []
    order = sorted(grouped.items(), key=lambda item: (item[0][0], not any(n.children for n in item[1]), item[0]))
    for (elsewhere, where, host), group in order:
        names = [f"zone {where}" if where else "no zone"] if elsewhere and (where or parent is not None) else []
        names += [f"host {host}"] if host else []
        rows.append((", ".join(names), elsewhere and parent is not None, _in_order(group)))
    return rows


def _in_order(nodes: Iterable[Node]) -> list[Node]:
    """Return those with readers first, then the loudest ones."""

    def key(node: Node) -> tuple[bool, int, str]:
        loud = _LOUDEST.index(node.state) if node.state in _LOUDEST else len(_LOUDEST)
        return not node.children, loud, node.replica

    return sorted(nodes, key=key)


def _count(nodes: Iterable[Node]) -> Counter[str]:
    """Count replicas and all that stand below them, by state."""
    found: Counter[str] = Counter()
    ahead = list(nodes)
    while ahead:
        node = ahead.pop()
        found[node.state] += 1
        ahead += node.children
    return found
