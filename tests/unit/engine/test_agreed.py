"""All ranks of an engine are filled in one way: by boxes, or through the engine's own loading."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

torch = pytest.importorskip("torch")

from tensorhub_core.engine.fit import Fit, agreed, fit_logical  # noqa: E402
from tensorhub_core.engine.logical import LogicalTensor  # noqa: E402
from tensorhub_core.errors import DeadlineExceeded, LayoutMismatch  # noqa: E402
from tests.unit.engine.toy import ToyMemory, weights  # noqa: E402

SOURCES = [LogicalTensor(name, "float32", tuple(tensor.shape)) for name, tensor in weights(1).items()]


def described(*, computes: bool) -> tuple[ToyMemory, Callable[[], Fit]]:
    memory = ToyMemory(computes=computes)
    return memory, lambda: fit_logical(memory, SOURCES)


def said_by(memory: ToyMemory, describe: Callable[[], Fit]) -> str:
    """Return what a rank tells the others."""
    said: list[str] = []

    def alone(text: str) -> Sequence[str]:
        said.append(text)
        return said

    try:
        agreed(memory, describe, alone)
    except Exception:
        assert said, "a rank that fails says so"
    return said[0]


@pytest.mark.parametrize("computes", [False, True])
def test_ranks_that_are_alike_stay_as_they_are(computes: bool) -> None:
    memory, describe = described(computes=computes)
    found = agreed(memory, describe, lambda text: [text, text])
    assert found.streamed is computes
    assert (found.boxes is None) is computes


def test_where_one_rank_has_to_stream_all_do() -> None:
    """As of a bias that is zero on all ranks but the first, which then is not what was published."""
    other = said_by(*described(computes=True))
    memory, describe = described(computes=False)
    found = agreed(memory, describe, lambda text: [text, other])
    streaming = described(computes=True)[1]()
    assert (found.streamed, found.boxes, found.tag) == (True, None, streaming.tag)
    assert (found.note, found.sources) == (streaming.note, SOURCES)
    assert set(found.tensors) == set(memory.parameters())


def test_what_fails_on_one_rank_fails_on_all() -> None:
    def late() -> Fit:
        raise DeadlineExceeded("no version came")

    memory, describe = described(computes=False)
    told = said_by(memory, late)
    with pytest.raises(DeadlineExceeded, match="no version came"):
        agreed(memory, late, lambda text: [text, said_by(memory, describe)])
    with pytest.raises(LayoutMismatch, match="another rank of this engine cannot be filled: no version came"):
        agreed(memory, describe, lambda text: [text, told])


def test_a_rank_that_knows_no_tensors_cannot_stream_with_the_others() -> None:
    memory, _ = described(computes=False)
    raw = Fit(dict(memory.parameters()), tag="loaded:toy")
    with pytest.raises(LayoutMismatch, match="different forms"):
        agreed(memory, lambda: raw, lambda text: [text, said_by(*described(computes=True))])
    assert agreed(memory, lambda: raw, lambda text: [text, text]) is raw
