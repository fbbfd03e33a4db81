"""The installed SGLang is the release that the adapter was written for, and has every place where it plugs in."""

from __future__ import annotations

from tensorhub_sglang.compat import WRITTEN_FOR
from tensorhub_sglang.plug_points import find_problems, installed_folder, installed_version


def test_the_installed_release_has_every_plug_in_point() -> None:
    assert installed_version() == WRITTEN_FOR
    assert find_problems(installed_folder()) == ()
