"""Every validator finds the history that breaks its law, and none objects to a right one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.processes.lives import validators
from tests.processes.lives.validators import Line, judge

CALL_S = 5.0
PIDS = {("trainer-0", 0): 1, ("trainer-0", 1): 2, ("reader-0", 0): 3, ("reader-0", 1): 4}


class Story:
    """A history that is told line by line; the clock ticks with every line."""

    def __init__(self) -> None:
        self.lines: list[Line] = []
        self.now = 0.0

    def tell(self, place: tuple[str, int], kind: str, *, pid: int = 0, after_s: float = 0.1, **what: Any) -> None:
        self.now += after_s
        replica, shard = place
        line = {"t": self.now, "kind": kind, "pid": pid or PIDS[place], "replica": replica, "shard": shard, **what}
        self.lines.append(line)

    def call(self, place: tuple[str, int], name: str, *, after_s: float = 0.1, pid: int = 0, **what: Any) -> None:
        asked = {"version": what["version"]} if name == "publish" else {}
        self.tell(place, "begin", call=name, pid=pid, **asked)
        self.tell(place, "end", call=name, after_s=after_s, pid=pid, **{"error": None, "epoch": 1, **what})

    def hear(self, place: tuple[str, int], message: str, **what: Any) -> None:
        self.tell(place, "in", message=message, **what)


R0, R1, T0, T1 = ("reader-0", 0), ("reader-0", 1), ("trainer-0", 0), ("trainer-0", 1)


def right() -> Story:
    """Return a version's life in which all is well."""
    story = Story()
    for place in PIDS:
        story.hear(place, "Welcome", server_epoch=7)
        story.tell(place, "ready")
    for place in (T0, T1):
        story.call(place, "publish", version=1)
    for place in (R0, R1):
        story.hear(place, "Promise", round=0, epoch=1, number=1)
        story.hear(place, "Committed", round=0, published=True)
        story.call(place, "update", version=1)
        story.tell(place, "bytes", version=1, right=True)
        story.tell(place, "late", late=False)
    return story


def early(story: Story) -> None:
    story.call(T0, "publish", version=2)
    story.call(R0, "update", version=2)
    story.call(T1, "publish", version=2)


def two_promises(story: Story) -> None:
    story.hear(R0, "Promise", round=1, epoch=1, number=2)
    story.hear(R1, "NothingNewer", round=1, epoch=1, number=1)


def torn(story: Story) -> None:
    story.tell(R0, "bytes", version=1, right=False)


def superseded(story: Story) -> None:
    story.tell(R0, "ready", pid=30)
    story.call(R0, "update", version=1)


def late(story: Story) -> None:
    story.tell(R1, "late", late=True)


def backwards(story: Story) -> None:
    story.call(T0, "publish", version=2)
    story.call(T1, "publish", version=2)
    story.call(R0, "update", version=2)
    story.call(R1, "update", version=1)


def half_committed(story: Story) -> None:
    story.hear(R0, "Committed", round=1, published=True)
    story.hear(R1, "RoundAborted", round=1, code="state_error")


def endless(story: Story) -> None:
    story.tell(R0, "begin", call="update")
    story.tell(R1, "bytes", version=1, right=True, after_s=CALL_S + validators.SLACK_S + 1)


def slow(story: Story) -> None:
    story.call(R0, "update", version=1, after_s=CALL_S + validators.SLACK_S + 1)


def test_a_right_history_is_right() -> None:
    assert judge(right().lines, CALL_S) == []


@pytest.mark.parametrize(
    ("wrong", "law"),
    [
        (early, "l1_nothing_is_seen_before_it_is_whole"),
        (two_promises, "l2_all_shards_of_a_round_are_promised_the_same"),
        (torn, "l3_what_is_read_does_not_change"),
        (superseded, "l8_the_superseded_do_nothing"),
        (late, "l9_nothing_lands_late"),
        (backwards, "l10_latest_never_goes_back"),
        (half_committed, "l13_a_round_commits_for_all_or_none"),
        (endless, "every_call_ends"),
        (slow, "every_call_ends"),
    ],
)
def test_what_breaks_a_law_is_found_by_its_validator(wrong: Callable[[Story], None], law: str) -> None:
    story = right()
    wrong(story)
    found = judge(story.lines, CALL_S)
    assert found
    assert {line.split(":")[0] for line in found} == {law}


def test_a_hub_that_starts_again_begins_to_count_anew() -> None:
    story = right()
    for place in (R0, R1):
        story.hear(place, "Welcome", server_epoch=8)
        story.hear(place, "Promise", round=0, epoch=1, number=2)
    assert judge(story.lines, CALL_S) == []
