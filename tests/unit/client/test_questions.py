"""What sources are asked about cuts: batches that only depend on the plan, few at a time, and an end to patience."""

from __future__ import annotations

import numpy as np
import pytest

from tensorhub_core.client.exactness import carried_over
from tensorhub_core.client.questions import BATCH_BYTES, FIRST_BYTES, MOST_OPEN, CutBatch, Questions, batches_of
from tensorhub_core.layout.cuts import Cuts, ExactPolicy
from tensorhub_core.layout.plan import plan_read
from tensorhub_core.layout.types import Box
from tensorhub_core.state.bounds import MOST_CUTS
from tests.unit.layout.shapes import layout, spec

PATIENCE_S = 2.0


def cuts(lengths: list[int]) -> Cuts:
    length = np.array(lengths, np.int64)
    zero = np.zeros(len(length), np.int64)
    return Cuts(np.arange(len(length)), zero, length, length, zero + 1)


def asked(questions: Questions, now: float = 0.0) -> list[int]:
    return [batch.first for _, batch in questions.next(now)]


@pytest.mark.parametrize("lengths", [[1] * 20_000, [4 << 20] * 100, [200 << 20, 1, 1], [1, 200 << 20, 1], []])
def test_batches_cover_all_cuts_in_order_and_are_bounded(lengths: list[int]) -> None:
    batches = batches_of(3, cuts(lengths))
    assert [n for b in batches for n in range(b.first, b.first + b.count)] == list(range(len(lengths)))
    for number, batch in enumerate(batches):
        length = sum(lengths[batch.first : batch.first + batch.count])
        assert batch.source == 3
        assert batch.count <= MOST_CUTS
        assert batch.count == 1 or length <= (BATCH_BYTES if number else FIRST_BYTES)


def questions(sources: int = 1, batches: int = 5) -> Questions:
    return Questions([[CutBatch(s, b, 1) for b in range(batches)] for s in range(sources)], PATIENCE_S, 0.0, 0)


def test_few_are_open_and_the_next_follows_an_answer() -> None:
    mine = questions()
    first = mine.next(0.0)
    assert [batch.first for _, batch in first] == list(range(MOST_OPEN))
    assert asked(mine) == []
    assert mine.given(first[1][0], 0.0) == first[1][1]
    assert mine.given(first[1][0], 0.0) is None, "an answer counts once"
    assert asked(mine) == [MOST_OPEN]


def test_each_source_has_its_own() -> None:
    assert len(questions(sources=3).next(0.0)) == 3 * MOST_OPEN


def test_what_is_put_off_is_asked_again_but_not_at_once() -> None:
    mine = questions(batches=1)
    ((number, _),) = mine.next(0.0)
    mine.put_off(number, 0.0)
    assert asked(mine, 0.01) == []
    assert asked(mine, 0.2) == [0]


def test_a_new_connection_asks_all_that_is_open_anew_in_order() -> None:
    mine = questions()
    before = mine.next(0.0)
    mine.ask_again(1.0)
    again = mine.next(0.0)
    assert [batch for _, batch in again] == [batch for _, batch in before]
    assert mine.given(before[0][0], 0.0) is None, "an answer to what was asked before"


def test_patience_ends_once_and_counts_from_the_last_answer() -> None:
    mine = questions()
    first, second = mine.next(0.0)
    assert mine.overdue(1.9) is None
    mine.given(first[0], 1.9)
    assert mine.overdue(3.8) is None
    overdue = mine.overdue(3.9)
    assert overdue is not None
    assert overdue[0] == 0
    assert mine.overdue(99.0) is None
    assert asked(mine, 99.0) == [], "it is asked no more"
    assert mine.given(second[0], 99.0) is not None, "what it says late still counts"


def test_after_a_new_connection_nobody_is_given_up_and_patience_begins_anew() -> None:
    """The server may have been away: that is not the silence of a source; and who was given up may be read on."""
    mine = questions()
    (number, _), _ = mine.next(0.0)
    assert mine.give_up(number) == 0
    assert asked(mine) == []
    mine.ask_again(5.0)
    assert asked(mine, 5.0) == [0, 1]
    assert mine.overdue(5.0 + PATIENCE_S - 0.1) is None
    assert mine.overdue(5.0 + PATIENCE_S) == (0, PATIENCE_S)


def test_being_put_off_does_not_extend_patience() -> None:
    mine = questions(batches=1)
    for now in np.arange(0.0, 1.9, 0.1).tolist():
        for number, _ in mine.next(now):
            mine.put_off(number, now)
    assert mine.overdue(PATIENCE_S) is not None


def test_who_is_done_is_never_overdue() -> None:
    mine = questions(batches=1)
    ((number, _),) = mine.next(0.0)
    mine.given(number, 0.1)
    assert mine.overdue(99.0) is None


def test_a_source_that_was_given_up_leaves_the_others_alone() -> None:
    mine = questions(sources=2)
    number = mine.next(0.0)[0][0]
    assert mine.give_up(number) == 0
    assert mine.give_up(12345) is None
    for open_number, batch in [(n, b) for n, b in list(mine._sources[1].open.items())]:
        assert batch.source == 1
        mine.given(open_number, 0.0)
    assert {batch.source for _, batch in mine.next(0.0)} == {1}


def test_what_is_verified_stays_so_between_cuts_and_whole_segments() -> None:
    source = layout(spec("w", 640, 4096), segment_bytes=1 << 16)
    own = layout(spec("w", 640, 2048, boxes=[Box("w", (0, 1024), (640, 2048), (0, 0))]), segment_bytes=1 << 16)
    exact, whole = plan_read(own, [source], exact=ExactPolicy()), plan_read(own, [source])
    assert (exact.cut >= 0).any()
    rng = np.random.default_rng(0)
    for before, after in ((exact, whole), (whole, exact), (exact, exact)):
        verified = rng.random(len(before)) < 0.5
        carried = carried_over(before, verified, after)
        done = set(before.segment.tolist()) - set(before.segment[~verified].tolist())
        assert after.segment[carried].tolist() == [s for s in after.segment.tolist() if s in done]
    assert carried_over(exact, np.ones(len(exact), np.bool_), whole).all()
    assert not carried_over(exact, np.zeros(len(exact), np.bool_), whole).any()
