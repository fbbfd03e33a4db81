"""Progress is a bar on a terminal and a few lines elsewhere."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from tensorhub_core.cli import progress


def shown(terminal: bool, reports: list[tuple[int, int]]) -> str:
    out = io.StringIO()
    console = Console(file=out, force_terminal=terminal, width=120)
    with progress.byte_progress("pulling policy", console) as report:
        for done, total in reports:
            report(done, total)
    return out.getvalue()


def test_a_bar_on_a_terminal() -> None:
    text = shown(True, [(0, 4_000_000), (1_000_000, 4_000_000), (4_000_000, 4_000_000)])
    assert "pulling policy" in text
    assert "4.0/4.0 MB" in text


def test_only_the_end_is_a_line_when_it_is_quick() -> None:
    text = shown(False, [(0, 4_000_000), (1_000_000, 4_000_000), (4_000_000, 4_000_000), (4_000_000, 4_000_000)])
    (line,) = text.splitlines()
    assert line.startswith("pulling policy: 100% of 4.0 MB, ")
    assert line.endswith("/s")


def test_lines_come_at_intervals(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "LINE_EVERY_S", 0.0)
    lines = shown(False, [(done, 4) for done in range(5)]).splitlines()
    assert [line.split(":")[1].split("%")[0].strip() for line in lines] == ["0", "25", "50", "75", "100"]


def test_some_work_is_only_shown_on_a_terminal() -> None:
    with progress.terminal_progress("reading", Console(file=io.StringIO(), force_terminal=False)) as report:
        assert report is None
    out = io.StringIO()
    with progress.terminal_progress("reading", Console(file=out, force_terminal=True, width=120)) as report:
        assert report is not None
        report(1, 2)
    assert "reading" in out.getvalue()


def test_nothing_to_move_is_all_of_it() -> None:
    assert shown(False, [(0, 0)]).startswith("pulling policy: 100% of 0 bytes")
