"""Offload copies of one worker: made, offered, kept, dropped, refused, whatever the server says meanwhile."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from tensorhub_core.client import offload, offload_copy
from tensorhub_core.client.memory import RegisteredMemory
from tensorhub_core.client.offload import OffloadPolicy, Offloads
from tensorhub_core.client.offload_copy import Original
from tensorhub_core.client.sums import pack_sums
from tensorhub_core.errors import TransportError
from tensorhub_core.layout.canonical import digest_of
from tensorhub_core.state.messages import (
    DropOffload,
    Failure,
    Offload,
    Offloaded,
    OffloadFailed,
    OffloadKept,
    Ok,
    PutBlob,
    Reply,
    Request,
)
from tensorhub_core.transport.memory import MemoryNetwork, MemoryTransport

pytestmark = pytest.mark.timeout(60)
SIZE = 400_000


class Wire:
    """Takes the place of a session: remembers what is said, and answers as a server that keeps every copy."""

    def __init__(self) -> None:
        self.offloads: tuple[tuple[Any, ...], tuple[PutBlob, ...]] = ((), ())
        self.said: list[Request] = []
        self.answer: Callable[[Request], Reply | None] = lambda m: (
            OffloadKept(f"kept {m.copy}") if isinstance(m, Offloaded) else Ok()
        )

    def submit(self, message: Request, answer: Callable[[Reply], None], *, life: int | None = None) -> int:
        self.said.append(message)
        reply = self.answer(message)
        if reply is not None:
            answer(reply)
        return len(self.said)

    def of(self, kind: type) -> list[Any]:
        return [message for message in self.said if isinstance(message, kind)]


class Bench:
    """The offload copies of a worker whose memory holds what the test says."""

    def __init__(self, **policy: Any) -> None:
        self.wire, self.network = Wire(), MemoryNetwork()
        self.originals: dict[tuple[int, int], Original] = {}
        self.transports: list[MemoryTransport] = []
        self.made = Offloads(self.wire, self.transport, self.originals.get, OffloadPolicy(**policy))  # type: ignore[arg-type]

    def transport(self) -> MemoryTransport:
        self.transports.append(MemoryTransport(self.network))
        return self.transports[-1]

    def hold(self, number: int, size: int = SIZE) -> np.ndarray[Any, Any]:
        weights = np.random.default_rng(number).integers(0, 256, size, np.uint8)
        memory = RegisteredMemory({"w": weights}, segment_bytes=4096)
        blobs = [PutBlob(digest_of(data), data) for data in (memory.layout_blob, pack_sums(memory.sums()))]
        self.originals[(1, number)] = Original((1, number), memory, *blobs)
        return weights

    def ask(self, number: int, copy: str | None = None) -> None:
        self.made.on_push(Offload(copy or f"original {number}", 1, number))

    def until(self, what: Callable[[], object]) -> None:
        end_s = time.monotonic() + 20
        while not what():
            assert time.monotonic() < end_s, self.wire.said
            time.sleep(0.002)

    def kept(self) -> list[int]:
        return [number for _, number in self.made.versions()]


@pytest.fixture
def bench() -> Iterator[Bench]:
    bench = Bench()
    yield bench
    bench.made.close()


def test_a_copy_is_made_offered_and_named_in_hellos(bench: Bench) -> None:
    weights = bench.hold(7)
    bench.ask(7)
    bench.until(bench.kept)
    (offered,) = bench.wire.of(Offloaded)
    (placement,) = bench.wire.of(PutBlob)
    assert (offered.copy, offered.placement) == ("original 7", placement.digest)
    held, blobs = bench.wire.offloads
    original = bench.originals[(1, 7)]
    assert [(h.epoch, h.number, h.total_bytes, h.num_segments) for h in held] == [
        (1, 7, SIZE, len(original.memory.table))
    ]
    assert {held[0].layout, held[0].placement, held[0].sums} == {blob.digest for blob in blobs}
    weights[:] = 0
    copy = bench.made._entries[0].memory
    assert copy is not None
    assert copy._arena.buffers[0].tobytes() == np.random.default_rng(7).integers(0, 256, SIZE, np.uint8).tobytes()
    assert (bench.made.held_bytes(), bench.made.made) == (SIZE, 1)


@pytest.mark.parametrize("by_placement", [True, False])
def test_a_dropped_copy_is_cut_off_then_freed(bench: Bench, by_placement: bool) -> None:
    for number in (7, 8):
        bench.hold(number)
        bench.ask(number)
        bench.until(lambda number=number: number in bench.kept())
    entry = bench.made._entries[0]
    order: list[str] = []
    shutdown = bench.transports[0].shutdown
    bench.transports[0].shutdown = lambda: order.append(f"cut off, memory {entry.memory is not None}") or shutdown()  # type: ignore[func-returns-value,method-assign]
    assert entry.memory is not None
    placement = entry.memory.placement.digest
    # After a restart of the server the copy has an id that this worker has not heard.
    bench.made.on_push(DropOffload("new id", placement) if by_placement else DropOffload("kept original 7"))
    assert [h.number for h in bench.wire.offloads[0]] == [8], "a hello does not name it any more, at once"
    bench.until(lambda: bench.made.held_bytes() == SIZE)
    assert order == ["cut off, memory True"]
    assert (bench.kept(), entry.memory, entry.original) == ([8], None, None)


def test_dropped_before_it_is_whole(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    bench.hold(7, 40_000_000)
    begun, go_on = threading.Event(), threading.Event()
    fill = offload.OffloadMemory.fill

    def slowly(self: Any, original: Original, stop: Callable[[], bool], **more: Any) -> bool:
        begun.set()
        assert go_on.wait(20)
        return fill(self, original, stop, **more)

    monkeypatch.setattr(offload.OffloadMemory, "fill", slowly)
    bench.ask(7)
    assert begun.wait(20)
    bench.made.on_push(DropOffload("original 7"))
    go_on.set()
    bench.until(lambda: bench.made.held_bytes() == 0)
    assert bench.wire.of(Offloaded) == bench.wire.of(OffloadFailed) == []
    monkeypatch.undo()
    bench.ask(7, "asked anew")
    bench.until(bench.kept)
    assert [m.copy for m in bench.wire.of(Offloaded)] == ["asked anew"]


def test_asked_again_while_it_is_made_or_when_it_is_there(bench: Bench) -> None:
    """A server that was restarted asks for the copy under another id: the copy that there is serves it."""
    bench.hold(7)
    bench.ask(7)
    bench.ask(7)
    bench.ask(7, "asked anew")
    bench.until(lambda: bench.kept() and [m.copy for m in bench.wire.of(Offloaded)][-1] == "asked anew")
    bench.ask(7, "and again")
    bench.until(lambda: bench.wire.of(Offloaded)[-1].copy == "and again")
    assert (len(bench.transports), bench.made.held_bytes()) == (1, SIZE)
    assert len(bench.wire.offloads[0]) == 1


def test_a_copy_that_is_not_needed_any_more_is_freed(bench: Bench) -> None:
    bench.wire.answer = lambda m: Failure("state_error", "not needed") if isinstance(m, Offloaded) else Ok()
    bench.hold(7)
    bench.ask(7)
    bench.until(lambda: bench.wire.of(Offloaded) and bench.made.held_bytes() == 0)
    assert (bench.kept(), bench.wire.offloads) == ([], ((), ()))


def test_an_answer_to_an_older_question_does_not_end_the_copy(bench: Bench) -> None:
    """After a restart the old id means nothing to the server: `Failure`, while the new question is on its way."""
    answers: list[Callable[[Reply], None]] = []
    submit = bench.wire.submit
    bench.wire.submit = lambda m, answer, **more: (  # type: ignore[method-assign]
        answers.append(answer) or submit(m, lambda _: None) if isinstance(m, Offloaded) else submit(m, answer)
    )
    bench.hold(7)
    bench.ask(7)
    bench.until(lambda: len(answers) == 1)
    bench.ask(7, "asked anew")
    bench.until(lambda: len(answers) == 2)
    answers[0](Failure("state_error", "unknown"))
    answers[1](OffloadKept("kept"))
    assert bench.kept() == [7]


def test_the_original_is_not_what_it_was(bench: Bench) -> None:
    bench.hold(7)[100] ^= 1
    bench.ask(7)
    bench.until(lambda: bench.made.held_bytes() == 0 and bench.wire.of(OffloadFailed))
    (failed,) = bench.wire.of(OffloadFailed)
    assert (failed.copy, failed.code) == ("original 7", "corrupt_transfer")
    assert "version 7" in failed.message


def test_with_verify_off_nothing_is_compared() -> None:
    bench = Bench(check=False)
    bench.hold(7)[100] ^= 1
    bench.ask(7)
    bench.until(bench.kept)
    bench.made.close()


def test_what_the_worker_has_just_been_told_of_may_be_noted_a_little_later(bench: Bench) -> None:
    bench.ask(7)
    time.sleep(0.1)
    assert not bench.wire.of(OffloadFailed)
    bench.hold(7)
    bench.until(bench.kept)


def test_what_the_worker_does_not_hold(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offload, "_NOTED_S", 0.05)
    bench.ask(7)
    bench.until(lambda: bench.wire.of(OffloadFailed))
    assert bench.wire.of(OffloadFailed)[0].code == "corrupt_transfer"


def test_more_than_the_limit() -> None:
    bench = Bench(limit_bytes=SIZE - 1)
    bench.hold(7)
    assert bench.made.room_bytes() == SIZE - 1
    bench.ask(7)
    bench.until(lambda: bench.wire.of(OffloadFailed) and bench.made.held_bytes() == 0)
    (failed,) = bench.wire.of(OffloadFailed)
    assert failed.code == "config_error"
    assert all(word in failed.message for word in ("offload_limit_bytes", f"{SIZE:,}", f"{SIZE - 1:,}", "retain = 0"))
    assert (bench.transports, bench.made.room_bytes()) == ([], SIZE - 1)
    bench.made.close()


def test_a_copy_waits_for_the_room_of_one_that_goes() -> None:
    bench = Bench(limit_bytes=SIZE + 10, patience_s=20.0)
    bench.hold(7)
    bench.ask(7)
    bench.until(bench.kept)
    assert bench.made.room_bytes() == 10
    bench.hold(8)
    bench.ask(8)
    time.sleep(0.1)
    assert (bench.kept(), bench.wire.of(OffloadFailed)) == ([7], [])
    bench.made.on_push(DropOffload("kept original 7"))
    bench.until(lambda: bench.kept() == [8])
    assert bench.made.room_bytes() == 10
    bench.made.close()


def test_it_does_not_wait_longer_than_it_may() -> None:
    bench = Bench(limit_bytes=SIZE + 10, patience_s=0.1)
    for number in (7, 8):
        bench.hold(number)
        bench.ask(number)
    bench.until(lambda: bench.wire.of(OffloadFailed))
    assert bench.wire.of(OffloadFailed)[0].copy == "original 8"
    bench.until(lambda: bench.kept() == [7])
    bench.ask(8, "once more")
    bench.until(lambda: len(bench.wire.of(OffloadFailed)) == 2)
    bench.made.close()


@pytest.mark.parametrize("available", [None, SIZE, SIZE - 1])
def test_what_the_machine_has_not(monkeypatch: pytest.MonkeyPatch, available: int | None) -> None:
    monkeypatch.setattr(offload, "available_bytes", lambda: available)
    bench = Bench()
    bench.hold(7)
    bench.ask(7)
    bench.until(lambda: bench.wire.of(OffloadFailed) if available == SIZE - 1 else bench.kept())
    bench.made.close()


@pytest.mark.parametrize("error", [MemoryError(), TransportError("no files"), ValueError("a fault of ours")])
def test_whatever_goes_wrong_is_said_and_nothing_is_left(bench: Bench, error: Exception) -> None:
    def broken(original: Original, transport: MemoryTransport) -> Any:
        raise error

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(offload, "OffloadMemory", broken)
        bench.hold(7)
        bench.ask(7)
        bench.until(lambda: bench.wire.of(OffloadFailed) and bench.made.held_bytes() == 0)
    code = "transport_error" if isinstance(error, TransportError) else "state_error"
    assert bench.wire.of(OffloadFailed)[0].code == code
    bench.ask(7)
    bench.until(bench.kept)


def test_a_thread_that_cannot_be_started(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    def none_left(thread: threading.Thread) -> None:
        raise TransportError("no threads")

    bench.hold(7)
    with monkeypatch.context() as patch:
        patch.setattr(offload, "start_thread", none_left)
        bench.ask(7)
    assert bench.wire.of(OffloadFailed)[0].code == "transport_error"
    assert bench.made.held_bytes() == 0
    bench.ask(7)
    bench.until(bench.kept)


def test_who_leaves_makes_no_copies_but_keeps_those_it_has(bench: Bench) -> None:
    for number in (7, 8):
        bench.hold(number)
    bench.ask(7)
    bench.until(bench.kept)
    bench.made.refuse()
    bench.ask(8)
    assert bench.wire.of(OffloadFailed)[0].copy == "original 8"
    assert bench.kept() == [7]


def test_close_ends_everything_and_leaves_no_thread(bench: Bench) -> None:
    bench.hold(7)
    bench.hold(8, 60_000_000)
    bench.ask(7)
    bench.until(bench.kept)
    bench.ask(8)
    bench.made.close()
    bench.made.close()
    assert bench.made.held_bytes() == 0
    assert not [t for t in threading.enumerate() if t.name.startswith("tensorhub-offload")]
    bench.ask(7)
    assert bench.made.held_bytes() == 0


@pytest.mark.parametrize("told", [True, False])
def test_memory_is_given_back_only_when_no_copy_reads_it_any_more(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, told: bool
) -> None:
    weights = bench.hold(7)
    begun, go_on, order = threading.Event(), threading.Event(), list[str]()
    copy_batch = offload_copy._Copying._copy_batch

    def slowly(self: Any, begin: int, end: int) -> None:
        begun.set()
        assert go_on.wait(20)
        copy_batch(self, begin, end)
        order.append("read")

    monkeypatch.setattr(offload_copy._Copying, "_copy_batch", slowly)
    bench.ask(7)
    assert begun.wait(20)
    if told:  # a restarted server does not know that it had asked for a copy
        bench.made.on_push(DropOffload("original 7"))
    bench.made.release(lambda: (order.append("given back"), weights.fill(0))[0])
    assert order == []
    go_on.set()
    bench.until(lambda: len(order) > 1 and not len(bench.made))
    assert order == ["read", "given back"]
    assert bench.wire.said == [], "nobody is blamed, and nothing is offered"


def test_memory_that_no_copy_reads_is_given_back_at_once_and_copies_that_are_made_stay(bench: Bench) -> None:
    done: list[int] = []
    bench.made.release(lambda: done.append(1))
    bench.hold(7)
    bench.ask(7)
    bench.until(bench.kept)
    bench.made.release(lambda: done.append(2))
    assert done == [1, 2]
    assert bench.kept() == [7]
