"""A manifest that grows with what is verified: whose it is, what it says, and how who follows it reads."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import numpy as np
import pytest

from tensorhub_core.client.access import SourceBook, SourceFault
from tensorhub_core.client.executor import ReadExecutor
from tensorhub_core.client.moves import heard
from tensorhub_core.client.progressive import Progressive, right_by, sums_between, with_sums
from tensorhub_core.client.reading import ReadEnd
from tensorhub_core.client.rounds import Abandon, Advance, Begin, Plan, Planned, Pushed, Reopened, Stop
from tensorhub_core.client.sums import pack_sums
from tensorhub_core.clock import Deadline
from tensorhub_core.errors import CorruptTransfer
from tensorhub_core.layout.canonical import digest_of
from tensorhub_core.layout.plan import plan_read
from tensorhub_core.layout.read_plan import plan_raw
from tensorhub_core.layout.types import Box
from tensorhub_core.state.messages import Blob, Promise, Source, SourceProgress, Welcome
from tests.unit.client.reading_world import Holder, Network, Record, empty_like, model
from tests.unit.client.round_driver import CANCELLED, Driver

SHAPES = {"a": (16, 256), "b": (40, 100)}


def packed(count: int, base: int = 100) -> bytes:
    return pack_sums(np.arange(base, base + count, dtype=np.uint64))


def partial(lease: str = "l1", known: bytes = b"", prefix: int | None = None) -> Source:
    prefix = len(known) // 8 if prefix is None else prefix
    return Source(lease, "w", "r", 0, 1, b"layout", b"place", b"", False, prefix, False, True, known)


# --- the one that reshards ------------------------------------------------------------------------------------------


def halves(network: Network) -> list[Holder]:
    """Two shards that have the rows of every tensor."""
    whole, found = model(1, SHAPES), []
    for shard in range(2):
        parts, boxes = {}, {}
        for name, array in whole.items():
            rows = len(array) // 2
            parts[name] = array[shard * rows : (shard + 1) * rows].copy()
            boxes[name] = [Box(name, (shard * rows, 0), parts[name].shape, (0, 0))]
        found.append(network.holder(parts, boxes=boxes, shard=shard, num_shards=2, segment_bytes=2048))
    return found


def test_checksums_come_in_order_and_are_those_of_the_memory() -> None:
    network = Network()
    sources = halves(network)
    reader = network.holder(model(1, SHAPES), segment_bytes=1024)
    plan = plan_read(reader.memory.layout, [each.memory.layout for each in sources])
    own, sums = Progressive(reader.memory, plan), reader.memory.sums()
    for reads in range(len(plan) + 1):
        before = own.count
        own.fill(reads)
        assert own.count >= before
        assert np.array_equal(own.sums[: own.count], sums[: own.count])
    assert own.count == len(sums)
    assert own.packed(2, 3) == pack_sums(sums[2:5])
    assert own.packed(len(sums), 3) == b""
    assert np.array_equal(own.finish(), sums)


def test_no_more_is_summed_in_one_turn_than_is_worth_it() -> None:
    reader = Network().holder(model(1, SHAPES), segment_bytes=1024)
    own = Progressive(reader.memory, replace(plan_raw(reader.memory.table), raw=False))
    counts = []
    for _ in range(4):
        own.fill(len(reader.memory.table), 2048)
        counts.append(own.count)
    assert counts == [2, 4, 6, 8]
    own.fill(len(reader.memory.table), 1)
    assert own.count == 9, "one at least"


def test_memory_that_changes_while_it_is_filled_is_noticed_at_the_end() -> None:
    tensors = model(1, SHAPES)
    reader = Network().holder(tensors, segment_bytes=1024)
    own = Progressive(reader.memory, replace(plan_raw(reader.memory.table), raw=False))
    own.fill(4)
    tensors["a"].reshape(-1).view(np.uint8)[1100] ^= 1
    with pytest.raises(CorruptTransfer, match="segment 1 of what was read has changed"):
        own.finish()


def test_what_is_right_by_another_source_is_kept_segment_by_segment() -> None:
    network = Network()
    reader, other = (network.holder(model(1, SHAPES), segment_bytes=1024) for _ in range(2))
    access, count = other.access(), len(other.memory.table)
    sums, verified = access.sums.copy(), np.ones(count, np.bool_)
    sums[3] += np.uint64(1)
    verified[5] = False
    kept = right_by(access, verified, sums, None)
    assert kept is not None
    assert np.flatnonzero(~kept).tolist() == [3, 5]
    kept = right_by(replace(access, known=2), verified, sums, None)
    assert kept is not None
    assert np.flatnonzero(kept).tolist() == [0, 1], "the others cannot be compared"
    own = Progressive(reader.memory, replace(plan_raw(reader.memory.table), raw=False))
    kept = right_by(access, np.arange(count) < 4, None, own)
    assert kept is not None
    assert np.flatnonzero(kept).tolist() == [0, 1, 2, 3]
    assert right_by(access, verified, None, None) is None


def test_sums_between_are_those_of_the_memory() -> None:
    memory = Network().holder(model(1, SHAPES), segment_bytes=1024).memory
    assert np.array_equal(sums_between(memory, 3, 20), memory.sums()[3:20])


# --- who follows ----------------------------------------------------------------------------------------------------


def test_segments_are_read_when_their_checksums_are_known() -> None:
    network = Network()
    source = network.holder(model(1, SHAPES), segment_bytes=1024)
    reader = network.holder(empty_like(source.tensors), segment_bytes=1024)
    whole, count = source.access(), len(source.memory.table)
    access = replace(whole, sums=np.where(np.arange(count) < 2, whole.sums, np.uint64(0)), prefix=2, known=2)
    executor = ReadExecutor(reader.transport)
    try:
        record = Record()
        job = executor.start(plan_raw(reader.memory.table), [access], reader.destination(), None, record)
        assert job.wait(0.1) is None
        job.advance("lease", count)  # a prefix alone is no leave
        assert job.wait(0.1) is None
        assert max(prefix for prefix, *_ in record.heard) <= 2
        job.know("lease", 1, whole.sums[1:5])
        job.know("other", 0, whole.sums)
        assert job.wait(0.1) is None
        assert max(prefix for prefix, *_ in record.heard) <= 5
        job.know("lease", 5, whole.sums[5:])
        ended = job.wait(20)
        assert ended is not None
        assert ended.end is ReadEnd.VERIFIED
        assert reader.holds(source.tensors)
    finally:
        executor.close()


def test_what_does_not_match_an_announced_checksum_is_not_taken() -> None:
    network = Network()
    source = network.holder(model(1, SHAPES), segment_bytes=1024)
    reader = network.holder(empty_like(source.tensors), segment_bytes=1024)
    whole, count = source.access(), len(source.memory.table)
    access = replace(whole, sums=np.zeros(count, np.uint64), known=0)
    executor = ReadExecutor(reader.transport)
    try:
        job = executor.start(plan_raw(reader.memory.table), [access], reader.destination(), None, Record())
        wrong = whole.sums.copy()
        wrong[4] ^= np.uint64(1)
        job.know("lease", 0, wrong)
        ended = job.wait(20)
        assert ended is not None
        assert (ended.end, ended.kind) == (ReadEnd.SOURCE_FAILED, "corrupt")
        assert not ended.verified[4]
    finally:
        executor.close()


def test_checksums_are_taken_in_as_they_come() -> None:
    assert heard(packed(2), 2, packed(3, 102)) == packed(5)
    assert heard(packed(2), 0, packed(3)) == packed(3)
    assert heard(packed(3), 0, packed(2)) == packed(3)
    assert heard(packed(2), 1, packed(2, 500)) is None
    assert heard(packed(2), 3, packed(1, 103)) == packed(2), "with one missing before it says nothing"
    access = replace(Network().holder(model(1, SHAPES), segment_bytes=1024).access(), known=2)
    more = with_sums(access, packed(5))
    assert (more.known, more.sums[2:5].tolist()) == (5, [102, 103, 104])
    assert with_sums(more, packed(3)) is more
    assert with_sums(more, packed(1000)) is more, "more than it has segments"


def test_a_source_that_says_too_much_is_another_ones_turn() -> None:
    holder = Network().holder(model(1, SHAPES), segment_bytes=1024)
    memory = holder.memory

    def call(message: object, deadline: object) -> object:
        blob = memory.placement("memory", holder.description)
        assert digest_of(blob) == message.digest  # type: ignore[attr-defined]
        return Blob(message.digest, blob)  # type: ignore[attr-defined]

    book = SourceBook(call, "memory")  # type: ignore[arg-type]
    book.know(memory.fingerprint, memory.layout, memory.table)
    placement = digest_of(memory.placement("memory", holder.description))
    promised = replace_source(partial(known=packed(3)), layout=memory.fingerprint, placement=placement)
    (access,) = book.access([promised], {"l1": 2}, Deadline.after(None, 0.0))
    assert (access.known, access.prefix, access.sums[:4].tolist()) == (3, 2, [100, 101, 102, 0])
    (access,) = book.access([promised], {"l1": 9}, Deadline.after(None, 0.0), {"l1": packed(5)})
    assert (access.known, access.prefix) == (5, 5)
    for odd in (packed(1)[:5], packed(len(memory.table) + 1)):
        with pytest.raises(SourceFault):
            book.access([promised], {"l1": 0}, Deadline.after(None, 0.0), {"l1": odd})


def replace_source(source: Source, **more: object) -> Source:
    return msgspec.structs.replace(source, **more)


# --- the round ------------------------------------------------------------------------------------------------------


def reading(known: bytes = b"") -> Driver:
    driver = Driver()
    driver.feed(Begin())
    assert driver.promise(partial(known=known)) == [Plan(True)]
    driver.feed(Planned())
    assert driver.state.running
    return driver


def test_a_round_goes_as_far_as_checksums_are_known() -> None:
    driver = reading(packed(1))
    assert driver.feed(Pushed(SourceProgress("l1", 3, False, 1, packed(2, 101)))) == [Advance("l1", 3, False)]
    assert driver.feed(Pushed(SourceProgress("l1", 5, True, 4, packed(1, 104)))) == [Advance("l1", 3, False)]
    assert driver.state.known == {"l1": packed(3)}
    assert driver.feed(Pushed(SourceProgress("l1", 4, True, 3, packed(1, 103)))) == [Advance("l1", 4, True)]


def test_a_source_that_announces_something_else_is_left() -> None:
    driver = reading(packed(2))
    (left,) = driver.feed(Pushed(SourceProgress("l1", 3, False, 1, packed(2, 900))))
    assert isinstance(left, Abandon)
    assert (left.lease, left.kind) == ("l1", "corrupt")


def test_the_same_source_of_another_life_of_the_server_is_read_on_by_what_is_known() -> None:
    driver = reading(packed(3))

    driver.feed(Reopened(Welcome("w", 2, 0, 3, 1, 5.0, 1.0)))
    effects = driver.answer(Promise(3, 1, 7, (partial("n1", packed(1)),)))
    assert Advance("l1", 1, False) in effects
    assert driver.state.known == {"n1": packed(3)}
    assert driver.feed(Pushed(SourceProgress("n1", 2, False, 1, packed(1, 101)))) == [Advance("l1", 2, False)]


def test_the_same_memory_with_other_checksums_is_planned_anew() -> None:
    driver = reading(packed(3))

    driver.feed(Reopened(Welcome("w", 2, 0, 3, 1, 5.0, 1.0)))
    assert driver.answer(Promise(3, 1, 7, (partial("n1", packed(2, 700)),))) == [Stop()]
    assert driver.state.known == {"n1": packed(2, 700)}
    assert driver.feed(CANCELLED) == [Plan(True)]
