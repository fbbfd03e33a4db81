from __future__ import annotations

import io
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console

from demo.account import Account
from demo.engines import Engine, Report
from demo.late import LateEngine
from demo.processes import Child, Children, DemoError

LOADING = "INFO Starting to load model /tmp/bare..."
FILLED = "INFO shard 0 of 1 of 'rollout-2' serves version 7 from rollout-1 (100 bytes, digest aa)"


class FakeEngine(Engine):
    """An engine that is up when the test says so."""

    up = False

    def look(self) -> Report | None:
        return Report(7, "serving", "", ("rollout-1",), 100, 0.0, 0.0, 0.0, 0.0) if self.up else None


class Stage:
    """A late engine whose program does nothing and whose log the test writes."""

    def __init__(self, children: Children) -> None:
        self._children = children
        self.engine = FakeEngine("rollout-2", 1, timeout_s=1)
        self.program: Child | None = None
        self.output = io.StringIO()
        account = Account(Console(file=self.output, width=200))
        self.late = LateEngine(self._start, [], account, starts_at=2, joins_by=5)

    def _start(self) -> tuple[Engine, Child]:
        assert self.program is None, "started twice"
        self.program = self._children.start("rollout-2", [sys.executable, "-c", "import time; time.sleep(600)"])
        return self.engine, self.program

    def says(self, *lines: str) -> None:
        assert self.program is not None
        self.program.log.write_text("".join(f"{line}\n" for line in lines))


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    with Children(tmp_path) as children:
        yield Stage(children)


def test_it_joins_once_when_it_is_up(stage: Stage) -> None:
    assert stage.late.join(1) is None
    assert stage.program is None, "too early"
    assert [stage.late.join(version) for version in (2, 3)] == [None, None]
    assert stage.program is not None
    stage.says(LOADING, FILLED)
    stage.engine.up = True
    assert stage.late.join(4) is stage.engine
    assert stage.late.join(5) is None
    assert stage.late.first_fill is not None
    assert stage.late.first_fill.source == "rollout-1"
    assert "it started with version 7, 0.0 MB from rollout-1" in stage.output.getvalue()


def test_training_waits_for_it_in_the_end(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("demo.late._READY_S", 0.3)
    stage.late.join(2)
    with pytest.raises(DemoError, match="rollout-2 is ready: not after"):
        stage.late.join(5)


def test_no_version_is_published_while_it_fills(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("demo.late._READY_S", 0.3)
    stage.late.hold()  # not started yet
    stage.late.join(2)
    stage.late.hold()  # started, but far from filling
    stage.says(LOADING)
    with pytest.raises(DemoError, match="rollout-2 is filled: not after"):
        stage.late.hold()
    stage.says(LOADING, FILLED)
    stage.late.hold()


def test_an_engine_that_does_not_say_where_it_filled_from_proves_nothing(stage: Stage) -> None:
    stage.late.join(2)
    stage.engine.up = True
    with pytest.raises(DemoError, match="does not say"):
        stage.late.join(3)


def test_an_engine_that_ends_is_noticed(stage: Stage) -> None:
    stage.late.join(2)
    assert stage.program is not None
    stage._children.stop(stage.program, 0.2)
    with pytest.raises(DemoError, match="rollout-2 ended"):
        stage.late.join(3)
