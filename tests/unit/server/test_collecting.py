"""A hub's process looks for cycles seldom, and finds them nevertheless."""

from __future__ import annotations

import gc
import subprocess
import sys
import weakref
from collections.abc import Iterator

import pytest

from tensorhub_core.server.collecting import NEW_OBJECTS, collect_seldom


class Ring:
    """An object that holds itself."""

    def __init__(self) -> None:
        self.other = self


@pytest.fixture
def as_before() -> Iterator[None]:
    before = gc.get_threshold()
    yield
    gc.set_threshold(*before)
    gc.unfreeze()


@pytest.mark.usefixtures("as_before")
def test_a_cycle_is_freed_after_so_many_new_objects() -> None:
    collect_seldom()
    lost = weakref.ref(Ring())
    kept = [[n] for n in range(NEW_OBJECTS // 2)]
    assert lost() is not None
    kept += [[n] for n in range(NEW_OBJECTS)]
    assert lost() is None, f"{len(kept)} objects later"


@pytest.mark.parametrize("module", ["tensorhub_core.cli.serve", "tensorhub_core.server.__main__"])
def test_both_ways_to_start_a_hub_do_so(module: str) -> None:
    text = f"import {module} as made; print(made.collect_seldom.__module__)"
    said = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=True, timeout=60)
    assert said.stdout.strip() == "tensorhub_core.server.collecting"
