"""What a seed takes, from whom, and into which buffer; and memory that mirrors another worker's."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field
from typing import Any

import click
import numpy as np
import pytest

from tensorhub_core.cli.seed import bytes_of
from tensorhub_core.client import mirror
from tensorhub_core.client.memory import RegisteredMemory
from tensorhub_core.client.mirror import blank_memory
from tensorhub_core.client.observer import Held
from tensorhub_core.client.seeding import MOST_VERSIONS, Seeder, check_memory, choose_layouts, together
from tensorhub_core.client.versions import Version
from tensorhub_core.errors import ConfigError, LayoutMismatch, StateError, VersionUnavailable
from tensorhub_core.layout.types import Layout
from tests.processes.client.samples import SAMPLES, make

pytestmark = pytest.mark.timeout(60)


def layout(shard: int = 0, num_shards: int = 1, tag: str = "", rows: int = 3) -> Layout:
    return RegisteredMemory({"w": np.zeros((rows, 2))}, shard=shard, num_shards=num_shards, tag=tag).layout


def held(replica: str, *layouts: Layout) -> list[Held]:
    return [Held(replica, each.shard, each.num_shards, each) for each in layouts]


@dataclass
class FakeWorker:
    """Remembers what it is told to do."""

    replica: str
    shard: int
    done: list[tuple[str, Any]]
    error: Exception | None = None
    closed: list[str] = field(default_factory=list)

    def mirror(self, layout: Layout) -> None:
        self.done.append((f"{self.replica}/{self.shard} mirrors", layout))

    def update(self, number: int) -> None:
        self.done.append((f"{self.replica}/{self.shard} takes", number))
        if self.error is not None:
            raise self.error

    def close(self) -> None:
        self.closed.append(self.replica)


class FakeHub:
    """Connects fake workers."""

    def __init__(self) -> None:
        self.workers: list[FakeWorker] = []
        self.done: list[tuple[str, Any]] = []
        self.error: Exception | None = None

    def connect(self, replica: str, shard: int, num_shards: int) -> Any:
        self.workers.append(FakeWorker(replica, shard, self.done, self.error))
        return self.workers[-1]

    def seeder(self, versions: int = 1) -> Seeder:
        return Seeder(self.connect, "keeper", versions, lambda: False)


def test_versions_go_round_the_buffers() -> None:
    hub, layouts = FakeHub(), (layout(),)
    seeder = hub.seeder(versions=2)
    for number in range(1, 8):
        assert seeder.take(Version(number, 1), layouts)
        assert {buffer.version for buffer in seeder.buffers} >= set(range(max(1, number - 1), number + 1))
    takes = [what for what, _ in hub.done if "takes" in what]
    assert takes == [f"keeper-{letter}/0 takes" for letter in "abcabca"]
    assert len(hub.workers) == 3, "made once"


def test_a_new_epoch_is_newer_whatever_its_numbers() -> None:
    hub, layouts = FakeHub(), (layout(),)
    seeder = hub.seeder()
    for version in (Version(8, 1), Version(9, 1), Version(0, 2)):
        seeder.take(version, layouts)
    assert {buffer.version.key for buffer in seeder.buffers if buffer.version is not None} == {(1, 9), (2, 0)}


def test_other_layouts_get_other_workers() -> None:
    hub = FakeHub()
    seeder = hub.seeder()
    seeder.take(Version(1, 1), (layout(),))
    seeder.take(Version(2, 1), (layout(),))
    seeder.take(Version(3, 1), (layout(0, 2), layout(1, 2)))
    assert [worker.closed for worker in hub.workers] == [["keeper-a"], [], [], []]
    last = [what for what, _ in hub.done[-4:]]
    assert last[:2] == [f"keeper-a/{shard} mirrors" for shard in (0, 1)]
    assert sorted(last[2:]) == [f"keeper-a/{shard} takes" for shard in (0, 1)]


@pytest.mark.parametrize("error", [VersionUnavailable("gone"), LayoutMismatch("no"), StateError("superseded")])
def test_a_failure_leaves_the_other_buffer_alone(error: Exception) -> None:
    hub = FakeHub()
    seeder = hub.seeder()
    seeder.take(Version(1, 1), (layout(),))
    hub.error = error
    with pytest.raises(type(error)):
        seeder.take(Version(2, 1), (layout(),))
    assert [buffer.version for buffer in seeder.buffers] == [1, None]
    assert bool(hub.workers[1].closed) == (not isinstance(error, VersionUnavailable)), "made anew unless it may go on"
    if hub.workers[1].closed:
        hub.error = None
    else:
        hub.workers[1].error = None
    seeder.take(Version(3, 1), (layout(),))
    assert [buffer.version for buffer in seeder.buffers] == [1, 3]


def test_from_whom_a_version_is_taken() -> None:
    plain, packed = layout(), layout(tag="packed")
    two = (layout(0, 2), layout(1, 2))
    everybody = [*held("keeper-a", plain), *held("engine", packed), *held("trainer", *two), *held("half", two[1])]
    assert choose_layouts(everybody, {"keeper-a"}, []) == two
    assert choose_layouts([*everybody, *held("single", plain)], {"keeper-a"}, []) == (plain,)
    assert choose_layouts([*everybody, *held("single", plain)], {"keeper-a"}, [two]) == two, "as before"
    assert choose_layouts(held("engine", packed), set(), [(plain,)]) == (packed,), "better than nothing"
    assert choose_layouts([*held("keeper-a", plain), *held("half", two[1])], {"keeper-a"}, []) is None


@pytest.mark.parametrize("versions", [0, -1, MOST_VERSIONS + 1])
def test_impossible_counts(versions: int) -> None:
    with pytest.raises(ConfigError):
        FakeHub().seeder(versions)


def test_together_waits_for_all_and_says_what_is_telling() -> None:
    ended: list[int] = []

    def fails(error: Exception) -> None:
        raise error

    def slow() -> None:
        time.sleep(0.1)
        ended.append(1)

    with pytest.raises(VersionUnavailable):
        together([lambda: fails(StateError("aborted")), slow, lambda: fails(VersionUnavailable("gone"))])
    assert ended == [1]
    assert together([slow, slow])
    assert together([])


def test_together_returns_when_it_is_stopped() -> None:
    go = threading.Event()
    assert not together([lambda: go.wait(30)], stopped=lambda: True)
    go.set()


@pytest.mark.parametrize("sample", sorted(SAMPLES))
@pytest.mark.parametrize("checksum", ["xxh3", "weighted"])
def test_mirrored_memory_has_the_very_layout(sample: str, checksum: Any) -> None:
    more = {"count": 500} if sample == "tiny" else {}
    original = RegisteredMemory(
        make(sample, 1, **more), shard=1, num_shards=3, tag="packed", segment_bytes=8192, checksum=checksum
    )
    mirrored = blank_memory(original.layout, 1, 3)
    assert mirrored.fingerprint == original.fingerprint
    assert mirrored.total_bytes == original.total_bytes
    mirrored.check_unmoved()
    with pytest.raises(LayoutMismatch, match="shard 1 of 3"):
        blank_memory(original.layout, 0, 3)


def test_mirrored_memory_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mirror, "available_bytes", lambda: 47)
    with pytest.raises(ConfigError, match="48 bytes of host memory, 47 are available"):
        blank_memory(layout(), 0, 1)


def test_memory_for_all_buffers_is_asked_for_at_once() -> None:
    one = layout(rows=1000)  # 16,000 bytes
    check_memory((one,), [()], 32_000, 32_000)
    check_memory((one,), [(one,)], 32_000, 16_000)
    for limit_bytes, available, text in ((31_999, None, "--memory allows 31,999"), (None, 31_999, "31,999 bytes of")):
        with pytest.raises(ConfigError, match=f"takes 16,000 bytes and 2 buffers 32,000.*{text}"):
            check_memory((one,), [()], limit_bytes, available)


@pytest.mark.parametrize(
    ("text", "size"),
    [("12", 12), ("12B", 12), ("600G", 600 * 10**9), ("1.5k", 1500), ("64GiB", 64 << 30), ("2 TB", 2 * 10**12)],
)
def test_a_size_in_words(text: str, size: int) -> None:
    assert bytes_of(text) == size


@pytest.mark.parametrize("text", ["", "G", "-1", "1.2.3G", "4 score", "1e9"])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(click.BadParameter):
        bytes_of(text)
