"""What is still to be posted: random sources take, land, fail and give back, and nothing is lost or done twice."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from tensorhub_core.client.backlog import Backlog, Span
from tensorhub_core.client.reading import Destination, SourceAccess
from tensorhub_core.client.transfers import Part, Schedule
from tensorhub_core.layout.canonical import build_layout
from tensorhub_core.layout.segments import SegmentTable
from tests.unit.client.reading_world import plan_of

LAYOUT = build_layout([], [], shard=0, num_shards=1)


def schedule_of(lengths: list[int], source: list[int] | None, sources: int) -> Schedule:
    count = len(lengths)
    each = np.arange(count, dtype=np.int32)
    size, zeros = np.array(lengths, np.uint64), np.zeros(count, np.uint64)
    fixed = np.zeros(count, np.int32) if source is None else np.array(source, np.int32)
    plan = plan_of(source is None, fixed, each, size, np.ones(count, np.bool_), each, zeros, {}, sum(lengths))
    table = SegmentTable(each, zeros, size, np.arange(count + 1))
    access = SourceAccess("l", "r", b"", LAYOUT, table, zeros, ("cpu",) * count, zeros, count)
    destination = Destination(LAYOUT, table, zeros, ("cpu",) * count, [None] * count)
    return Schedule(plan, [access] * sources, destination, np.zeros(count, np.bool_))


def next_of(backlog: Backlog, source: int, working: list[int]) -> Span | None:
    """Return what a source has to post first."""
    urgent = backlog.urgent(source, working)
    return urgent if urgent is not None else next(((*span, 0) for span in backlog.fresh(source)), None)


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_every_byte_is_posted_until_it_has_landed_right(data: st.DataObject) -> None:
    lengths = data.draw(st.lists(st.integers(1, 50), max_size=12))
    sources = data.draw(st.integers(1, 3))
    fixed = data.draw(st.none() | st.lists(st.integers(0, sources - 1), min_size=len(lengths), max_size=len(lengths)))
    schedule = schedule_of(lengths, fixed, sources)
    lengths, fixed = schedule.length_bytes.tolist(), None if fixed is None else schedule.source.tolist()
    backlog, working = Backlog(schedule), list(range(sources))
    flying: list[tuple[int, Part]] = []
    landed = np.zeros(len(lengths), np.int64)
    right = np.zeros(len(lengths), np.bool_)
    idle_turns = 20
    for _ in range(1_000):
        assert backlog.left_bytes >= 0
        if right.all() and not backlog:
            break
        able = [s for s in range(sources) if s in {flight[0] for flight in flying}]
        able += [s for s in working if s not in able and next_of(backlog, s, working) is not None]
        idle_turns -= 1
        source = data.draw(st.sampled_from(range(sources) if idle_turns > 0 else able))
        mine = [flight for flight in flying if flight[0] == source]
        span = next_of(backlog, source, working) if source in working else None
        if span is not None and (not mine or data.draw(st.booleans())):
            if backlog.urgent(source, working) is None:
                later = list(backlog.fresh(source, data.draw(st.integers(0, len(lengths) - 1))))
                span = (*data.draw(st.sampled_from(later)), 0) if later else span
            begin, end, offset = span
            assert fixed is None or fixed[begin] == source
            part = schedule.next_part(source, begin, end, offset, data.draw(st.integers(1, 60)), 4)
            assert not any(other[1].begin == begin and other[0] != source for other in flying), "one read, one source"
            backlog.posted(source, part)
            flying.append((source, part))
        elif mine:
            flying.remove(mine[0])
            part = mine[0][1]
            landed[part.begin] += part.length_bytes if part.end == part.begin + 1 else 0
            if backlog.landed(part):
                if part.end == part.begin + 1:
                    assert landed[part.begin] == lengths[part.begin], "complete means all of it"
                    landed[part.begin] = 0
                check(data, backlog, part, source, working if fixed is None else [source], right)
        elif fixed is None and len(working) > 1 and source in working and data.draw(st.booleans()):
            working.remove(source)  # a straggler; nothing of it is on its way
            held = [index for index in range(len(lengths)) if landed[index] and backlog.is_half(source)]
            backlog.give_back(source)
            assert not backlog.is_half(source)
            if held and not any(backlog.is_half(other) for other in working):
                landed[held] = 0
    else:
        raise AssertionError("it does not end")
    assert backlog.left_bytes == 0
    assert not flying


def check(
    data: st.DataObject, backlog: Backlog, part: Part, source: int, working: list[int], right: np.ndarray
) -> None:
    """Let the verifier find reads right or, seldom, wrong."""
    for index in range(part.begin, part.end):
        assert not right[index], "nothing that is right is read again"
        tried = backlog.wrong.get(index, [])
        others = [each for each in working if each not in tried and each != source]
        again = bool(others) or not tried
        if again and data.draw(st.integers(0, 5)) == 0:
            assert backlog.again(index, source, working), "another source, or once more from the only one"
        else:
            right[index] = True


def test_a_read_that_is_wrong_from_everywhere_is_used_up() -> None:
    backlog = Backlog(schedule_of([10], None, 2))
    for source in (0, 1):
        backlog.posted(source, Part(0, 1, 0, 10)) if source == 0 else backlog.posted(1, Part(0, 1, 0, 10))
        assert backlog.landed(Part(0, 1, 0, 10))
        assert backlog.again(0, source, [0, 1]) == (source == 0)
    assert backlog.wrong == {0: [0, 1]}


def test_a_read_of_another_layout_goes_to_its_own_source_once_more() -> None:
    backlog = Backlog(schedule_of([10, 11], [1, 0], 2))
    assert next_of(backlog, 0, [0, 1]) == (0, 1, 0), "of either source the first"
    assert next_of(backlog, 1, [0, 1]) == (1, 2, 0)
    backlog.posted(1, Part(1, 2, 0, 10))
    assert next_of(backlog, 1, [0, 1]) is None
    assert backlog.again(1, 1, [0, 1])
    assert backlog.urgent(0, [0, 1]) is None
    assert next_of(backlog, 1, [0, 1]) == (1, 2, 0)
    assert next_of(backlog, 0, [0, 1]) == (0, 1, 0)


def test_reads_that_wait_are_passed_over_and_come_later() -> None:
    backlog = Backlog(schedule_of([5] * 10, [0] * 8 + [1] * 2, 2))
    for begin, end in [(3, 5), (6, 7), (0, 1)]:
        backlog.posted(0, Part(begin, end, 0, 5 * (end - begin)))
    assert list(backlog.fresh(0)) == [(1, 3), (5, 6), (7, 8)]
    assert list(backlog.fresh(0, 2)) == [(2, 3), (5, 6), (7, 8)]
    assert list(backlog.fresh(0, 3)) == [(5, 6), (7, 8)]
    assert list(backlog.fresh(0, 8)) == []
    assert list(backlog.fresh(1)) == [(8, 10)]
    assert backlog.left_bytes == 30
    for begin, end in [(5, 6), (7, 8), (1, 3)]:
        assert backlog.has_work_for([0])
        backlog.posted(0, Part(begin, end, 0, 5 * (end - begin)))
    assert not backlog.has_work_for([0])
    assert backlog.has_work_for([0, 1])
    assert bool(backlog)
