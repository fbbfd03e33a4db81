"""Judge what the processes of a drill wrote down: one validator a law, each yields what speaks against it.

A history is the lines of all processes in the order of the monotonic clock, which the processes of a machine share.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

Line = dict[str, Any]
History = Sequence[Line]
SLACK_S = 6.0
"""What a call may take beyond its deadline, on a machine with more processes than cores."""


def judge(history: History, call_s: float) -> list[str]:
    """Return everything that speaks against a law, with the law's name."""
    found = [f"{law.__name__}: {witness}" for law in LAWS for witness in law(history)]
    return found + [f"every_call_ends: {witness}" for witness in every_call_ends(history, call_s)]


def l1_nothing_is_seen_before_it_is_whole(history: History) -> Iterator[str]:
    """Nobody gets a version before each shard of some publisher has asked to publish it."""
    asked: dict[tuple[int, str], dict[int, float]] = defaultdict(dict)
    for line in history:
        if line["kind"] == "begin" and line["call"] == "publish":
            asked[line["version"], line["replica"]].setdefault(line["shard"], line["t"])
    whole = {
        version: min(max(shards.values()) for (v, _), shards in asked.items() if v == version and len(shards) == 2)
        for version in {v for (v, _), shards in asked.items() if len(shards) == 2}
    }
    for line in history:
        got = line["kind"] == "end" and line["call"] == "update" and line["error"] is None
        if got and line["t"] < whole.get(line["version"], float("inf")):
            yield f"{_who(line)} got version {line['version']} before it was whole"


def l2_all_shards_of_a_round_are_promised_the_same(history: History) -> Iterator[str]:
    """Whatever the shards of a replica hear of a round names one version."""
    for (replica, generations, number), lines in _rounds(history).items():
        keys = {(x["epoch"], x["number"]) for x in lines if x["message"] in ("Promise", "NothingNewer")}
        if len(keys) > 1:
            yield f"{replica} was promised {sorted(keys)} in round {number} of {generations}"


def l3_what_is_read_does_not_change(history: History) -> Iterator[str]:
    """Every byte of what a call returned is its version's: publishers overwrite as soon as `unpublish` returns."""
    for line in history:
        if line["kind"] == "bytes" and not line["right"]:
            yield f"{_who(line)} holds wrong bytes of version {line['version']}"


def l8_the_superseded_do_nothing(history: History) -> Iterator[str]:
    """Once another process has taken a place, no call of the earlier one that begins later succeeds."""
    taken: dict[tuple[str, int], list[tuple[float, int]]] = defaultdict(list)
    for line in history:
        if line["kind"] == "ready" and "replica" in line:
            taken[line["replica"], line["shard"]].append((line["t"], line["pid"]))
    began: dict[int, float] = {}
    for line in history:
        if line["kind"] == "begin":
            began[line["pid"]] = line["t"]
        if line["kind"] != "end" or line["error"] is not None:
            continue
        lives = taken[line["replica"], line["shard"]]
        mine = next(t for t, pid in lives if pid == line["pid"])
        later = [t for t, _ in lives if t > mine]
        if later and began[line["pid"]] > min(later):
            yield f"{_who(line)} did {line['call']} after it was superseded"


def l9_nothing_lands_late(history: History) -> Iterator[str]:
    """After a call has failed, the memory does not change any more."""
    for line in history:
        if line["kind"] == "late" and line["late"]:
            yield f"{_who(line)}: bytes landed after the call had ended"


def l10_latest_never_goes_back(history: History) -> Iterator[str]:
    """A call that begins after another one has returned a version returns that one or a newer one."""
    best = (0, -1)
    ended: list[tuple[float, tuple[int, int]]] = []
    began: dict[int, tuple[int, int]] = {}
    for line in history:
        if line.get("call") != "update":
            continue
        if line["kind"] == "begin":
            began[line["pid"]] = best
        elif line["error"] is None:
            key = (line["epoch"], line["version"])
            if key < began[line["pid"]]:
                yield f"{_who(line)} got {key} when {began[line['pid']]} had been returned before"
            best = max(best, key)
            ended.append((line["t"], key))


def l13_a_round_commits_for_all_or_none(history: History) -> Iterator[str]:
    """No shard hears that a round was committed of which another hears that it was aborted."""
    for (replica, generations, number), lines in _rounds(history).items():
        committed = {x["shard"] for x in lines if x["message"] == "Committed"}
        aborted = {x["shard"] for x in lines if x["message"] == "RoundAborted"}
        if committed and aborted - committed:
            yield f"{replica}: round {number} of {generations} is committed for {committed}, aborted for {aborted}"


def every_call_ends(history: History, call_s: float) -> Iterator[str]:
    """No call outlives its deadline by much, but in a process that was killed or stopped meanwhile."""
    open_calls: dict[int, Line] = {}
    stopped = {line["pid"] for line in history if line["kind"] == "crash"}
    last = history[-1]["t"] if history else 0.0
    for line in history:
        if line["kind"] == "begin":
            open_calls[line["pid"]] = line
        elif line["kind"] == "end":
            begun = open_calls.pop(line["pid"])
            if line["t"] - begun["t"] > call_s + SLACK_S and line["pid"] not in stopped:
                yield f"{_who(line)}: {line['call']} took {line['t'] - begun['t']:.1f} s"
    for line in open_calls.values():
        if last - line["t"] > call_s + SLACK_S and line["pid"] not in stopped:
            yield f"{_who(line)}: {line['call']} never ended"


def _rounds(history: History) -> dict[tuple[str, str, int], list[Line]]:
    """Return what was heard of every round, by replica, the lives of its shards and of the hub, and its number."""
    lives: dict[str, dict[int, int]] = defaultdict(dict)
    hubs: dict[int, int] = {}
    found: dict[tuple[str, str, int], list[Line]] = defaultdict(list)
    for line in history:
        if line.get("message") == "Welcome":
            hubs[line["pid"]] = line["server_epoch"]
        if line["kind"] == "ready" and "replica" in line:
            lives[line["replica"]][line["shard"]] = line["pid"]
        if line["kind"] == "in" and "round" in line and lives[line["replica"]].get(line["shard"]) == line["pid"]:
            processes = (*(pid for _, pid in sorted(lives[line["replica"]].items())), hubs[line["pid"]])
            generation = "+".join(map(str, processes))
            found[line["replica"], generation, line["round"]].append(line)
    return found


def _who(line: Line) -> str:
    return f"{line['replica']}/{line['shard']} ({line['pid']})"


LAWS: tuple[Callable[[History], Iterator[str]], ...] = (
    l1_nothing_is_seen_before_it_is_whole,
    l2_all_shards_of_a_round_are_promised_the_same,
    l3_what_is_read_does_not_change,
    l8_the_superseded_do_nothing,
    l9_nothing_lands_late,
    l10_latest_never_goes_back,
    l13_a_round_commits_for_all_or_none,
)
