"""Who holds a version vouches for parts of it: right, only for bytes that are the version's, once for all who ask."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import xxhash
from numpy.typing import NDArray

from tensorhub_core.client import stock as stocks
from tensorhub_core.client import vouching
from tensorhub_core.client.device import TorchMemory
from tensorhub_core.client.memory import RegisteredMemory
from tensorhub_core.client.stock import Stock, sum_cuts
from tensorhub_core.client.sums import pack_sums
from tensorhub_core.client.vouching import Voucher
from tensorhub_core.client.weighted import weighted_sum
from tensorhub_core.errors import CorruptTransfer
from tensorhub_core.layout.canonical import digest_of
from tensorhub_core.layout.cuts import CUT_BYTES, Cuts, pack_cuts
from tensorhub_core.state.messages import GiveSums, PutBlob, SumsWanted
from tests.unit.client.test_device import adopt_cpu

pytestmark = pytest.mark.timeout(60)
SEGMENT = 4096
PLACE = b"placement"


class FakeSession:
    """Hears what the worker says."""

    def __init__(self) -> None:
        self.hellos = 1
        self.said: list[tuple[GiveSums, int]] = []

    def tell(self, message: Any, life: int) -> None:
        self.said.append((message, life))


class Holder:
    """Memory that holds a version, and its voucher."""

    def __init__(self, rows: int = 64, checksum: Any = "xxh3") -> None:
        self.tensor = np.random.default_rng(1).integers(0, 256, (rows, 1024), np.uint8)
        self.memory = RegisteredMemory({"w": self.tensor}, segment_bytes=SEGMENT, checksum=checksum)
        self.session = FakeSession()
        self.stock: Stock | None = None
        self.voucher = Voucher(self.session, self._find, TorchMemory(adopt_cpu))  # type: ignore[arg-type]
        self.publish()

    def _find(self, placement: bytes) -> Stock | None:
        return self.stock if placement == PLACE else None

    def publish(self) -> Stock:
        blob = pack_sums(self.memory.sums())
        self.stock = Stock(b"layout", PLACE, PutBlob(digest_of(blob), blob), self.memory)
        return self.stock

    def ask(self, cuts: Cuts | bytes, ticket: str = "t", **more: Any) -> None:
        data = cuts if isinstance(cuts, bytes) else pack_cuts(cuts)
        assert self.stock is not None
        self.voucher.on_push(
            SumsWanted(ticket, **{"placement": PLACE, "sums": self.stock.sums.digest, "cuts": data, **more})
        )

    def answers(self, count: int = 1) -> list[GiveSums]:
        end = time.monotonic() + 20
        while len(self.session.said) < count and time.monotonic() < end:
            time.sleep(0.002)
        assert len(self.session.said) == count, self.session.said
        return [message for message, _ in self.session.said]

    def idle(self) -> None:
        end = time.monotonic() + 20
        while self.voucher._thread is not None and time.monotonic() < end:
            time.sleep(0.002)
        assert self.voucher._thread is None


def columns(begin: int, end: int, segments: range = range(16)) -> Cuts:
    """Return columns begin..end of the tensor: four rows of 1,024 bytes a segment."""
    at = np.array(segments, np.int64)
    ones = np.ones_like(at)
    return Cuts(at, begin * ones, (end - begin) * ones, 1024 * ones, 4 * ones)


def right_sums(tensor: NDArray[np.uint8], begin: int, end: int, segments: range = range(16)) -> list[int]:
    parts = [np.ascontiguousarray(tensor[4 * s : 4 * s + 4, begin:end]) for s in segments]
    return [xxhash.xxh3_64_intdigest(part.data) for part in parts]


def given(message: GiveSums) -> list[int]:
    assert message.refusal == "", message
    return np.frombuffer(message.sums, "<u8").tolist()


@pytest.fixture
def holder() -> Iterator[Holder]:
    made = Holder()
    yield made
    made.voucher.close()


@contextmanager
def held_up(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[threading.Event, threading.Event]]:
    """Stop the thread in the middle of its first batch: (reached, go on)."""
    reached, go_on, real = threading.Event(), threading.Event(), stocks._sums_of_segments

    def slow(*what: Any) -> NDArray[np.uint64]:
        reached.set()
        assert go_on.wait(20)
        return real(*what)

    monkeypatch.setattr(stocks, "_sums_of_segments", slow)
    monkeypatch.setattr(stocks, "BATCH_BYTES", SEGMENT)
    yield reached, go_on
    go_on.set()


def test_the_sums_are_those_of_the_gathered_bytes(holder: Holder) -> None:
    holder.ask(columns(256, 512))
    (answer,) = holder.answers()
    assert answer.ticket == "t"
    assert given(answer) == right_sums(holder.tensor, 256, 512)


def test_cuts_in_any_order_and_several_of_one_segment_keep_their_places(holder: Holder) -> None:
    left, whole = columns(0, 256), columns(700, 1024)
    order = np.random.default_rng(2).permutation(32)
    both = Cuts(*(np.concatenate(pair)[order] for pair in zip(*(fields_of(c) for c in (left, whole)), strict=True)))
    holder.ask(both)
    expected = np.array(right_sums(holder.tensor, 0, 256) + right_sums(holder.tensor, 700, 1024), np.uint64)[order]
    assert given(holder.answers()[0]) == expected.tolist()


def fields_of(cuts: Cuts) -> tuple[NDArray[np.int64], ...]:
    return (cuts.segment, cuts.offset_bytes, cuts.run_bytes, cuts.stride_bytes, cuts.count)


@pytest.mark.parametrize("where", [0, 300, 1023], ids=["outside the cut", "inside", "behind"])
def test_changed_bytes_are_not_vouched_for(holder: Holder, where: int) -> None:
    holder.tensor[37, where] ^= 1
    holder.ask(columns(256, 512))
    (answer,) = holder.answers()
    assert answer.refusal == "corrupt"
    assert answer.sums == b""
    assert "segment 9 " in answer.detail
    assert "'w'" in answer.detail


def test_bytes_that_change_between_the_cut_and_its_segment_are_noticed(
    holder: Holder, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert holder.stock is not None
    real = stocks._sums_of_cuts

    def change_after(*what: Any) -> NDArray[np.uint64]:
        sums = real(*what)
        holder.tensor[0, 0] ^= 1
        return sums

    monkeypatch.setattr(stocks, "_sums_of_cuts", change_after)
    with pytest.raises(CorruptTransfer, match="segment 0 "):
        sum_cuts(holder.stock, [columns(0, 256)], lambda: False, TorchMemory(adopt_cpu))


def test_what_was_computed_before_a_change_is_still_the_version(holder: Holder) -> None:
    before = right_sums(holder.tensor, 0, 256)
    holder.ask(columns(0, 256), "1")
    holder.answers()
    holder.tensor[0, 0] ^= 1
    holder.ask(columns(0, 256), "2")
    assert given(holder.answers(2)[1]) == before, "so that the reader notices"


@pytest.mark.parametrize("data", [bytes(CUT_BYTES), bytes(CUT_BYTES - 1), b"\xff" * CUT_BYTES], ids=str)
def test_nonsense_is_refused(holder: Holder, data: bytes) -> None:
    holder.ask(data)
    assert holder.answers()[0].refusal == "unable"


def test_another_version_or_place_is_put_off(holder: Holder) -> None:
    holder.ask(columns(0, 256), sums=b"another manifest")
    holder.ask(columns(0, 256), placement=b"another place")
    assert [answer.refusal for answer in holder.answers(2)] == ["wait", "wait"]


@pytest.mark.parametrize("together", [False, True])
def test_eight_readers_of_one_layout_cost_one_computation(
    holder: Holder, together: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        if together:
            patch.setattr(Voucher, "_wake", lambda self: None)
        for number in range(8):
            holder.ask(columns(0, 512), str(number))
    holder.voucher._wake()
    answers = holder.answers(8)
    assert sorted(answer.ticket for answer in answers) == [str(number) for number in range(8)]
    assert len({answer.sums for answer in answers}) == 1
    assert holder.voucher.computed == 1


def test_readers_of_different_columns_compare_each_segment_once(
    holder: Holder, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted: list[int] = []
    real = stocks._sums_of_segments

    def count(memory: Any, segments: Any, devices: Any) -> NDArray[np.uint64]:
        counted.append(len(segments))
        return real(memory, segments, devices)

    monkeypatch.setattr(stocks, "_sums_of_segments", count)
    with monkeypatch.context() as patch:
        patch.setattr(Voucher, "_wake", lambda self: None)
        for number in range(4):
            holder.ask(columns(256 * number, 256 * number + 256), str(number))
    holder.voucher._wake()
    answers = {answer.ticket: given(answer) for answer in holder.answers(4)}
    assert answers == {str(n): right_sums(holder.tensor, 256 * n, 256 * n + 256) for n in range(4)}
    assert sum(counted) == 16


def test_the_next_version_is_computed_before_anybody_asks(holder: Holder) -> None:
    holder.ask(columns(0, 256), "1")
    holder.answers()
    holder.idle()
    holder.tensor[:] += 1
    holder.voucher.look_ahead(holder.publish())
    holder.idle()
    assert holder.voucher.computed == 2
    assert len(holder.session.said) == 1, "nobody asked"
    holder.ask(columns(0, 256), "2")
    assert given(holder.answers(2)[1]) == right_sums(holder.tensor, 0, 256)
    assert holder.voucher.computed == 2


def test_what_nobody_asks_for_any_more_is_forgotten(holder: Holder) -> None:
    holder.ask(columns(0, 256))
    holder.answers()
    for version in range(5):
        holder.idle()
        holder.tensor[:] += 1
        holder.voucher.look_ahead(holder.publish())
        holder.idle()
        assert holder.voucher.computed == 1 + min(version + 1, 2)


def test_what_is_kept_is_bounded(holder: Holder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vouching, "_ANSWERS_BYTES", 300)
    monkeypatch.setattr(vouching, "_LATELY_BYTES", 2000)
    for number in range(20):
        holder.ask(columns(number, 256), str(number))
        holder.answers(number + 1)
    voucher = holder.voucher
    assert voucher._answers_bytes == sum(map(len, voucher._answers.values())) <= 300
    assert voucher._lately_bytes == sum(len(each.data) for each in voucher._lately.values()) <= 2000
    assert voucher._lately


def test_too_many_questions_are_put_off(holder: Holder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vouching, "MOST_WAITING", 2)
    with held_up(monkeypatch) as (reached, go_on):
        holder.ask(columns(0, 256), "held")
        assert reached.wait(20)
        for number in range(4):
            holder.ask(columns(number + 1, 256), str(number))
        assert [answer.refusal for answer in holder.answers(2)] == ["wait", "wait"]
        go_on.set()
        assert sorted(answer.refusal for answer in holder.answers(5)) == ["", "", "", "wait", "wait"]


def test_memory_is_the_callers_again_when_nothing_reads_it(holder: Holder, monkeypatch: pytest.MonkeyPatch) -> None:
    done = threading.Event()
    with held_up(monkeypatch) as (reached, go_on):
        holder.ask(columns(0, 256))
        assert reached.wait(20)
        holder.stock = None
        holder.voucher.release(done.set)
        assert not done.wait(0.05), "a segment is being read"
        go_on.set()
        assert done.wait(20)
    assert holder.answers()[0].refusal == "wait"
    again = threading.Event()
    holder.idle()
    holder.voucher.release(again.set)
    assert again.is_set(), "at once where nothing is read"


def test_changed_memory_of_a_version_that_is_gone_is_nobodys_fault(
    holder: Holder, monkeypatch: pytest.MonkeyPatch
) -> None:
    with held_up(monkeypatch) as (reached, go_on):
        holder.ask(columns(0, 256, range(1)))
        assert reached.wait(20)
        holder.stock = None
        holder.tensor[:] = 0
        go_on.set()
    assert holder.answers()[0].refusal == "wait"


def test_close_ends_the_thread_and_answers_nothing(holder: Holder, monkeypatch: pytest.MonkeyPatch) -> None:
    with held_up(monkeypatch) as (reached, go_on):
        holder.ask(columns(0, 256))
        assert reached.wait(20)
        threading.Timer(0.05, go_on.set).start()
        holder.voucher.close()
        assert holder.voucher._thread is None
    holder.ask(columns(0, 128), "late")
    assert holder.session.said[-1][0].refusal == "wait"


def test_an_answer_belongs_to_the_connection_of_its_question(holder: Holder, monkeypatch: pytest.MonkeyPatch) -> None:
    with held_up(monkeypatch) as (reached, go_on):
        holder.ask(columns(0, 256))
        assert reached.wait(20)
        holder.session.hellos = 2
        go_on.set()
        holder.answers()
    assert holder.session.said[0][1] == 1


@pytest.mark.parametrize("cut", [columns(256, 512), columns(1, 1024), columns(0, 1, range(3, 5))], ids=range(3))
def test_memory_of_devices_is_summed_where_it_lies_with_the_same_checksum(cut: Cuts) -> None:
    holder = Holder(checksum="weighted")
    memory, devices = holder.memory, TorchMemory(adopt_cpu)
    assert holder.stock is not None
    here = sum_cuts(holder.stock, [cut], lambda: False, devices)
    memory.devices = ("cuda:0",)
    there = sum_cuts(holder.stock, [cut], lambda: False, devices)
    assert here is not None
    assert there is not None
    begin, end = int(cut.offset_bytes[0]), int(cut.offset_bytes[0] + cut.run_bytes[0])
    truth = [weighted_sum(np.ascontiguousarray(holder.tensor[4 * s : 4 * s + 4, begin:end])) for s in cut.segment]
    assert here[0].tolist() == there[0].tolist() == truth
    holder.tensor[4 * int(cut.segment[0]), 0] ^= 1
    with pytest.raises(CorruptTransfer):
        sum_cuts(holder.stock, [cut], lambda: False, devices)
