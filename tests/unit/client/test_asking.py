"""What a round asks about cuts, and what becomes of the answers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tensorhub_core.client import asking
from tensorhub_core.client.asking import Asker
from tensorhub_core.client.reading import SourceAccess
from tensorhub_core.errors import StateError
from tensorhub_core.layout.cuts import ExactPolicy, pack_cuts, unpack_cuts
from tensorhub_core.layout.plan import ReadPlan, plan_read
from tensorhub_core.layout.segments import segment_table
from tensorhub_core.layout.types import Box, Layout
from tensorhub_core.state.messages import AskSums, Failure, Ok, Reply, Source, SumsGiven
from tests.unit.layout.shapes import layout, spec

ROWS, COLUMNS, SHARDS = 256, 8192, 2


class Handle:
    """Hears what a read job would."""

    def __init__(self) -> None:
        self.known: dict[str, dict[int, int]] = {}

    def know(self, lease: str, first: int, sums: Any) -> None:
        self.known.setdefault(lease, {}).update(enumerate(sums.tolist(), first))


class World:
    """An asker, two sources by rows, a reader that needs half of the columns, and a clock."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        monkeypatch.setattr(asking.time, "monotonic", lambda: self.now)
        self.sources = [
            layout(
                spec("w", ROWS // 2, COLUMNS, boxes=[Box("w", (k * ROWS // 2, 0), (ROWS // 2, COLUMNS), (0, 0))]),
                at=(k, SHARDS),
                segment_bytes=1 << 16,
            )
            for k in range(SHARDS)
        ]
        own = layout(spec("w", ROWS, COLUMNS // 2, boxes=[Box("w", (0, 0), (ROWS, COLUMNS // 2), (0, 0))]))
        self.plan: ReadPlan = plan_read(own, self.sources, exact=ExactPolicy())
        self.sent: list[tuple[AskSums, Callable[[Reply], None], int | None]] = []
        self.refused: list[tuple[str, str]] = []
        self.asker = Asker(self._submit, 3, 2.0, lambda lease, kind, detail: self.refused.append((lease, kind)))
        self.handle = Handle()

    def _submit(self, message: Any, answer: Callable[[Reply], None], *, life: int | None = None) -> int:
        self.sent.append((message, answer, life))
        return len(self.sent)

    def begin(self, verified: Any = None, manifest: bytes = b"sums", handle: Handle | None = None) -> None:
        self.handle = handle or self.handle
        self.sent.clear()
        accesses = [access(number, each) for number, each in enumerate(self.sources)]
        sources = {
            f"l{k}": Source(f"l{k}", "w", "r", k, SHARDS, b"layout %d" % k, b"place", manifest + b" %d" % k)
            for k in range(SHARDS)
        }
        self.asker.begin(self.plan, accesses, sources, verified, self.handle)  # type: ignore[arg-type]
        self.turn()

    def turn(self, life: int = 1, **leases: str) -> None:
        self.asker.turn(leases, life)

    def answer(self, number: int = 0, offset: int = 0) -> None:
        message, answer, _ = self.sent[number]
        answer(SumsGiven(sums_of(message, offset)))

    def answer_all(self) -> None:
        for number in range(10_000):
            if number < len(self.sent):
                self.answer(number)


def access(number: int, source: Layout) -> SourceAccess:
    table = segment_table(source)
    sums = np.zeros(len(table), np.uint64)
    addresses = np.zeros(len(source.storages), np.uint64)
    return SourceAccess(f"l{number}", "r", b"", source, table, addresses, ("cpu",), sums, len(table))


def sums_of(message: AskSums, offset: int = 0) -> bytes:
    """Return sums that tell where they belong: the segment's number."""
    segments = np.frombuffer(message.cuts, "<u8").reshape(-1, 5)[:, 0]
    return (segments + np.uint64(offset)).astype("<u8").tobytes()


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    monkeypatch.setattr(asking, "batches_of", _small_batches)
    return World(monkeypatch)


def _small_batches(source: int, cuts: Any) -> list[asking.CutBatch]:
    return [asking.CutBatch(source, first, min(4, len(cuts) - first)) for first in range(0, len(cuts), 4)]


def test_every_cut_is_asked_for_under_the_lease_of_its_source(world: World) -> None:
    world.begin()
    world.answer_all()
    for number, source in enumerate(world.sources):
        cuts = world.plan.cuts_of(number)
        assert len(cuts) > 4
        asked = b"".join(m.cuts for m, *_ in world.sent if m.lease == f"l{number}")
        assert asked == pack_cuts(cuts)
        assert len(unpack_cuts(asked, segment_table(source))) == len(cuts)
        assert world.handle.known[f"l{number}"] == dict(enumerate(cuts.segment.tolist()))
    assert {m.round for m, *_ in world.sent} == {3}


def test_a_raw_plan_asks_nothing(world: World) -> None:
    world.plan = plan_read(world.sources[0], world.sources[:1], exact=ExactPolicy())
    world.begin()
    assert world.sent == []


def test_todays_leases_and_todays_connection_are_used(world: World) -> None:
    world.begin()
    before = len(world.sent)
    world.turn(life=2, l0="l7", l1="l8")
    again = world.sent[before:]
    assert [m.lease for m, *_ in again] == [{"l0": "l7", "l1": "l8"}[m.lease] for m, *_ in world.sent[:before]]
    assert [m.cuts for m, *_ in again] == [m.cuts for m, *_ in world.sent[:before]]
    assert {life for *_, life in again} == {2}
    world.answer(before)
    assert set(world.handle.known) == {"l0"}, "the read knows it by the old lease"


def test_what_was_heard_counts_for_the_next_read_of_the_same_cuts(world: World) -> None:
    world.begin()
    world.answer_all()
    world.asker.end()
    again = Handle()
    world.begin(handle=again)
    assert world.sent == []
    assert {lease: len(known) for lease, known in again.known.items()} == {
        f"l{k}": len(world.plan.cuts_of(k)) for k in range(SHARDS)
    }


def test_another_manifest_is_asked_anew(world: World) -> None:
    world.begin()
    world.answer_all()
    world.asker.end()
    again = Handle()
    world.begin(manifest=b"others", handle=again)
    assert world.sent
    assert not again.known


def test_an_answer_that_comes_between_two_reads_is_kept_but_told_nobody(world: World) -> None:
    world.begin()
    world.asker.end()
    first = world.sent[0]
    world.answer(0)
    assert not world.handle.known
    again = Handle()
    world.begin(handle=again)
    assert len(again.known["l0"]) == 4
    assert first[0].cuts not in [m.cuts for m, *_ in world.sent if m.lease == "l0"]


def test_what_is_verified_is_not_asked_for(world: World) -> None:
    world.begin(verified=np.ones(len(world.plan), np.bool_))
    assert world.sent == []


@pytest.mark.parametrize(
    ("reply", "kind"),
    [
        (SumsGiven(refusal="corrupt", detail="segment 1"), "corrupt"),
        (SumsGiven(refusal="unable"), "unable"),
        (SumsGiven(b"12345678"), "unable"),
        (SumsGiven(), "unable"),
        (Ok(), "unable"),
        (Failure("malformed_message", "what is that?"), "unable"),
    ],
    ids=str,
)
def test_a_refusal_is_told_and_ends_the_questions_to_that_source(world: World, reply: Reply, kind: str) -> None:
    world.begin()
    first = world.sent[0]
    first[1](reply)
    assert world.refused == [(first[0].lease, kind)]
    count = sum(m.lease == first[0].lease for m, *_ in world.sent)
    world.answer_all()
    assert sum(m.lease == first[0].lease for m, *_ in world.sent) == count
    assert len(world.handle.known["l1"]) == len(world.plan.cuts_of(1)), "the other one is asked on"


@pytest.mark.parametrize("reply", [SumsGiven(refusal="wait"), Failure(StateError.code, "the lease has ended")], ids=str)
def test_who_cannot_answer_now_is_asked_again_until_patience_ends(world: World, reply: Reply) -> None:
    world.begin()
    count = len(world.sent)
    world.sent[0][1](reply)
    assert len(world.sent) == count
    world.now = 0.2
    world.turn()
    assert world.sent[-1][0].cuts == world.sent[0][0].cuts
    world.now = 1.9
    world.answer(count - 1)
    assert world.refused == []
    world.now = 2.0
    world.turn()
    assert world.refused == [("l0", "unable")]


def test_silence_is_told_once_for_each_source(world: World) -> None:
    world.begin()
    world.now = 2.0
    for _ in range(4):
        world.turn()
    assert sorted(world.refused) == [("l0", "unable"), ("l1", "unable")]


def test_a_source_whose_refusal_fell_into_a_restart_is_asked_again(world: World) -> None:
    """The round waits for its promise then and hears of no refusal, but the same read goes on afterwards."""
    world.begin()
    world.now = 3.0
    world.turn()
    assert world.refused == [("l0", "unable")], "given up in the moment in which the server comes back"
    world.sent.clear()
    world.turn(2, l0="m0", l1="m1")
    assert {message.lease for message, _, _ in world.sent} == {"m0", "m1"}
    world.answer_all()
    assert {lease: len(known) for lease, known in world.handle.known.items()} == {
        f"l{k}": len(world.plan.cuts_of(k)) for k in range(SHARDS)
    }


def test_an_over_session_is_no_error_here(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    def over(*_: Any, **__: Any) -> int:
        raise StateError("the worker is closed")

    monkeypatch.setattr(world.asker, "_submit", over)
    world.begin()
    assert world.sent == []
