"""The mutant drill: the walk has to find each mutant, by a shortest trace that is kept in `golden/`."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.walk.mutants import Mutant
from tests.walk.search import Found, walk
from tests.walk.traces import render

GOLDEN = Path(__file__).parent / "golden"
MOST_STATES = 60_000


def find(mutant: Mutant) -> tuple[Found, str]:
    """Return what the walk finds in a mutant, and the trace for people."""
    with pytest.MonkeyPatch.context() as patch:
        mutant.switch_off(patch)
        found = walk(mutant.scene, MOST_STATES)
        return found, f"{mutant.law}: {(mutant.switch_off.__doc__ or '').strip()}\n{render(found)}"


def golden_of(mutant: Mutant) -> Path:
    """Return where a mutant's trace is kept."""
    return GOLDEN / f"{mutant.name}.txt"
