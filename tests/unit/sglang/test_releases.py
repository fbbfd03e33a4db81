"""The adapter plugs into what every release of SGLang has that it says it supports."""

from __future__ import annotations

from pathlib import Path

import pytest

from tensorhub_sglang import compat
from tensorhub_sglang.plug_points import PLUG_POINTS, PlugPoint, find_problems
from tests.unit.sglang.releases import FOLDER, unpack

RELEASES = ("0.5.21", "0.5.22", "0.5.23")


def test_every_supported_release_is_on_record() -> None:
    assert sorted(path.stem for path in FOLDER.glob("*.json")) == sorted(RELEASES)
    assert compat.WRITTEN_FOR in RELEASES


@pytest.mark.parametrize("version", RELEASES)
def test_a_release_has_every_plug_in_point(version: str, tmp_path: Path) -> None:
    assert find_problems(unpack(version, tmp_path)) == ()


@pytest.mark.parametrize("version", RELEASES)
def test_what_a_release_lacks_is_found_in_its_record(version: str, tmp_path: Path) -> None:
    package = unpack(version, tmp_path)
    scheduler = "sglang.srt.managers.scheduler"
    wrong = (
        PlugPoint(scheduler, "Scheduler.init_nothing", "is not there"),
        PlugPoint("sglang.srt.server_args", "ServerArgs.add_cli_args", "takes less", ("parser", "colour")),
    )
    problems = find_problems(package, (*PLUG_POINTS, *wrong))
    assert len(problems) == 2
    assert "init_nothing is not defined" in problems[0]
    assert "takes no parameter colour" in problems[1]
