"""What comes with a promise is not asked for, and what the server named itself is not sent to it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from tensorhub_core.client.access import SourceBook
from tensorhub_core.client.promised import Promised
from tensorhub_core.client.session import Session
from tensorhub_core.state import blobs
from tensorhub_core.state.messages import Discard, Ok, Promise, Source
from tests.unit.client.hubs import Hub, equal, hub, next_version, publisher, reader, weights

pytestmark = pytest.mark.timeout(60)
SOURCE = Source("l1", "w1", "trainer", 0, 1, b"layout", b"place", b"sums")


@pytest.fixture
def here() -> Iterator[Hub]:
    with hub() as made:
        yield made


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Count what all workers say."""
    counts: Counter[str] = Counter()
    for name in ("tell", "request"):
        whole = getattr(Session, name)

        def counted(self: Session, message: Any, *more: Any, whole: Any = whole, **options: Any) -> Any:
            counts[type(message).__name__] += 1
            return whole(self, message, *more, **options)

        monkeypatch.setattr(Session, name, counted)
    return counts


def test_a_round_neither_asks_for_blobs_nor_sends_the_checksums_back(here: Hub, said: Counter[str]) -> None:
    trainer = publisher(here)
    rollout, tensors = reader(here)
    said.clear()
    assert rollout.replicate() == 1
    assert (said["GetBlob"], said["PutBlob"]) == (0, 0)
    assert equal(tensors, weights())
    next_version(trainer, 2, 5)
    said.clear()
    assert rollout.update() == 2
    assert (said["GetBlob"], said["PutBlob"]) == (0, 0)
    assert equal(tensors, weights(5))
    late, copied = reader(here, "late")
    assert late.replicate() == 2
    assert equal(copied, weights(5))


def test_a_reader_asks_for_what_did_not_come(here: Hub, said: Counter[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blobs, "MOST_ENCLOSED_BYTES", 0)
    publisher(here)
    rollout, tensors = reader(here)
    said.clear()
    assert rollout.replicate() == 1
    assert (said["GetBlob"], said["PutBlob"]) == (2, 0)
    assert equal(tensors, weights())


def test_a_reader_of_another_layout_sends_the_checksums_of_what_it_derived(here: Hub, said: Counter[str]) -> None:
    publisher(here)
    rollout, tensors = reader(here, segment_bytes=8192)
    said.clear()
    assert rollout.replicate() == 1
    assert (said["GetBlob"], said["PutBlob"]) == (0, 1)
    assert equal(tensors, weights())


def test_only_the_life_that_promised_has_the_checksums() -> None:
    promised = Promised(SourceBook(lambda message, deadline: Ok(), "memory"))
    assert not promised.names(b"sums", 1)
    promised.hear(Promise(0, 1, 1, (SOURCE,)), 1)
    assert promised.names(b"sums", 1)
    assert not promised.names(b"others", 1)
    assert not promised.names(b"sums", 2), "a server that has restarted has nothing"
    promised.hear(Ok(), 2)
    assert not promised.names(b"sums", 2)
    promised.hear(Discard(0, (SOURCE,)), 2)
    assert promised.names(b"sums", 2)


def test_blobs_of_both_answers_are_remembered() -> None:
    asked: list[Any] = []
    book = SourceBook(lambda message, deadline: asked.append(message) or Ok(), "memory")  # type: ignore[func-returns-value]
    promised = Promised(book)
    promised.hear(Promise(0, 1, 1, (SOURCE,), (b"one", b"two")), 1)
    promised.hear(Discard(0, (SOURCE,), (b"two", b"three")), 1)
    assert list(book._blobs.values()) == [b"one", b"two", b"three"]
    assert book._bytes == len(b"onetwothree")
    assert not asked
