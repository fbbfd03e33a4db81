"""What `tensorhub status` prints is whole: names of replicas often differ at their ends only."""

from __future__ import annotations

import io
import re

import pytest
from rich.console import Console

from tensorhub_core.cli.status import render, wide_console
from tensorhub_core.state.messages import ModelStatus, ReplicaStatus, ShardStatus, StatusReply

NAMES = [f"keeper-of-a-machine-with-a-rather-long-name-{end}" for end in "ab"]
SHARDS = (ShardStatus(0, 3, "filling", 1, 2, NAMES[1], 1.0),)
REPLICAS = tuple(ReplicaStatus(name, "zone", "host", False, 3, "filling", SHARDS) for name in NAMES)
REPLY = StatusReply(1, 2.0, (ModelStatus("policy", None, 1, 3, (), REPLICAS),))


def test_what_is_no_terminal_gets_whole_lines(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    wide_console().print(render("tcp://a:1", REPLY))
    printed = capsys.readouterr().out
    for name in NAMES:
        (line,) = [line for line in printed.splitlines() if line.startswith(name)]
        assert f" {NAMES[1]} " in line, "whom it reads from"


def test_a_narrow_terminal_breaks_names_and_cuts_none() -> None:
    out = io.StringIO()
    Console(file=out, force_terminal=True, width=60, color_system=None).print(render("tcp://a:1", REPLY))
    assert "…" not in out.getvalue()
    first = [re.split(r"\s", line)[0] for line in out.getvalue().splitlines()[4:]]
    assert all(name in "".join(first) for name in NAMES)
