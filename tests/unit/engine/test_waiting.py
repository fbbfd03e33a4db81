"""An engine that starts before its trainer: it waits, says so, and gives up by its deadline."""

from __future__ import annotations

import pytest

from tensorhub_core.client.observer import Held
from tensorhub_core.client.versions import Version
from tensorhub_core.engine.waiting import TELL_EVERY_S, await_version
from tensorhub_core.errors import DeadlineExceeded, ServerUnreachable, VersionUnavailable
from tensorhub_core.ids import VersionKey
from tensorhub_core.layout.types import Layout, TensorSpec

HELD = [Held("trainer", 0, 1, Layout(0, 1, (TensorSpec("w", "float32", (2,)),), ((0,),)))]


class FakeWatch:
    """Versions appear at given seconds; waiting moves the clock."""

    server, model = "tcp://hub:1", "policy"

    def __init__(self, appears: dict[int, float], down_until: float = 0.0) -> None:
        self.appears, self.down_until = appears, down_until
        self.clock = 0.0
        self.told: list[str] = []
        self.asked = 0

    def now(self) -> float:
        return self.clock

    def _there(self) -> list[int]:
        return sorted(version for version, at in self.appears.items() if at <= self.clock)

    def holders(self, version: int | None, timeout_s: float | None) -> tuple[Version, list[Held]]:
        self.asked += 1
        assert self.asked < 200, "it spins"
        if self.clock < self.down_until:
            self.clock += timeout_s or 0.0
            raise ServerUnreachable("no answer from tcp://hub:1")
        there = self._there()
        if (version is None and there) or version in there:
            return Version(there[-1] if version is None else version, 0), HELD
        raise VersionUnavailable("nobody holds it")

    def wait(self, newer_than: VersionKey | None, timeout_s: float | None) -> Version:
        for version, at in sorted(self.appears.items(), key=lambda item: item[1]):
            if newer_than is None or (0, version) > newer_than:
                if at <= self.clock + (timeout_s or 0.0):
                    self.clock = max(self.clock, at)
                    return Version(version, 0)
                break
        self.clock += timeout_s or 0.0
        raise DeadlineExceeded("nothing newer")


def test_returns_at_once_what_is_there() -> None:
    watch = FakeWatch({3: 0.0})
    assert await_version(watch, "latest", 60.0, watch.told.append, watch.now) == (3, HELD)
    assert watch.told == []


def test_waits_for_the_first_version_and_says_so() -> None:
    watch = FakeWatch({0: 25.0})
    version, _ = await_version(watch, "latest", 60.0, watch.told.append, watch.now)
    assert (version, watch.clock) == (0, 25.0)
    assert len(watch.told) == 2
    assert "waiting for version of model 'policy' at tcp://hub:1 (10 s of 60 s): nobody holds it" in watch.told[0]


def test_waits_for_one_number_past_others() -> None:
    watch = FakeWatch({1: 0.0, 2: 1.0, 5: 12.0})
    version, _ = await_version(watch, 5, 60.0, watch.told.append, watch.now)
    assert (version, watch.clock) == (5, 12.0)


@pytest.mark.parametrize("wanted", ["latest", 9])
def test_gives_up_by_its_deadline_and_names_everything(wanted: int | str) -> None:
    watch = FakeWatch({} if wanted == "latest" else {1: 0.0})
    with pytest.raises(DeadlineExceeded) as caught:
        await_version(watch, wanted, 35.0, watch.told.append, watch.now)  # type: ignore[arg-type]
    assert watch.clock <= 35.0 + TELL_EVERY_S
    for word in ("policy", "tcp://hub:1", "35 s", "nobody holds it"):
        assert word in str(caught.value)


def test_outlasts_a_hub_that_is_not_there_yet() -> None:
    watch = FakeWatch({4: 0.0}, down_until=15.0)
    assert await_version(watch, "latest", 60.0, watch.told.append, watch.now)[0] == 4
