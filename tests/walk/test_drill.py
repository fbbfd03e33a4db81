"""Every law that the server decides, switched off: the walk finds it, by the shortest trace kept in `golden/`."""

from __future__ import annotations

import pytest

from tests.walk.drill import GOLDEN, find, golden_of
from tests.walk.mutants import MUTANTS, Mutant


@pytest.mark.timeout(300)
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_the_walk_finds_it(mutant: Mutant) -> None:
    found, text = find(mutant)
    assert found.broken, f"{found.states} states, and nothing is broken"
    kept = golden_of(mutant)
    assert kept.exists(), "keep its trace: python -m tests.walk --golden"
    assert text == kept.read_text(encoding="utf-8"), "the shortest trace has changed: python -m tests.walk --golden"


def test_every_law_of_the_server_has_a_mutant() -> None:
    assert {mutant.law for mutant in MUTANTS} >= {f"L{n:02}" for n in range(1, 15)} - {"L09"}, "L9 is the client's"


def test_no_trace_is_left_over() -> None:
    assert {path.stem for path in GOLDEN.glob("*.txt")} == {mutant.name for mutant in MUTANTS}
