"""The lock files are whole: exact, torch first, and with everything that TensorHub itself needs."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.static.sources import ROOT

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

LOCKS = sorted((ROOT / "tools" / "locks").glob("*.txt"))
BREAKS_VLLM_ON_CPU = {"torchvision", "torchaudio", "torchcodec", "triton", "vllm"}


def requirements(lock: Path) -> list[Requirement]:
    lines = (line.split("#")[0].strip() for line in lock.read_text(encoding="utf-8").splitlines())
    return [Requirement(line) for line in lines if line]


def declared() -> list[Requirement]:
    with (ROOT / "pyproject.toml").open("rb") as file:
        project = tomllib.load(file)["project"]
    return [Requirement(line) for line in (*project["dependencies"], *project["optional-dependencies"]["nixl"])]


def test_there_is_a_lock_for_every_environment() -> None:
    assert {lock.stem for lock in LOCKS} >= {"core", "vllm"}


@pytest.mark.parametrize("lock", LOCKS, ids=lambda lock: lock.stem)
def test_every_package_is_pinned_once(lock: Path) -> None:
    wanted = requirements(lock)
    assert wanted[0].name == "torch", "torch comes first: what follows must not choose it"
    assert [str(item) for item in wanted if not re.fullmatch(r"==[^,*+]+", str(item.specifier))] == []
    seen = [canonicalize_name(item.name) for item in wanted]
    assert sorted(seen) == sorted(set(seen))


@pytest.mark.parametrize("lock", LOCKS, ids=lambda lock: lock.stem)
def test_every_lock_satisfies_what_core_declares(lock: Path) -> None:
    locked = {canonicalize_name(item.name): next(iter(item.specifier)).version for item in requirements(lock)}
    for need in declared():
        if need.marker is None or need.marker.evaluate({"python_version": "3.11"}):
            assert need.specifier.contains(locked[canonicalize_name(need.name)]), need


def test_the_vllm_lock_keeps_out_what_breaks_it() -> None:
    names = {canonicalize_name(item.name) for item in requirements(ROOT / "tools" / "locks" / "vllm.txt")}
    assert names & BREAKS_VLLM_ON_CPU == set()
