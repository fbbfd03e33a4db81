"""An engine that is pointed at another, large model hears so soon, in a message that logs and answers can bear."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

torch = pytest.importorskip("torch")

from tensorhub_core.engine.fit import fit_logical  # noqa: E402
from tensorhub_core.engine.logical import LogicalTensor, logical_tensors  # noqa: E402
from tensorhub_core.engine.trace import MAX_CULPRITS, trace  # noqa: E402
from tensorhub_core.errors import LayoutMismatch  # noqa: E402
from tensorhub_core.layout.canonical import build_layout  # noqa: E402
from tensorhub_core.layout.match import MAX_MESSAGE_CHARS  # noqa: E402
from tensorhub_core.layout.types import Box, TensorSpec  # noqa: E402
from tests.unit.engine.toy import ToyMemory  # noqa: E402


def test_boxes_that_reach_further_than_any_memory_are_refused() -> None:
    """Each of them may be small, and is then no fault of the layout's."""
    far = (1 << 40, 1 << 40)
    spec = TensorSpec("part", "bfloat16", (2, 2), (Box("w", far, (2, 2), (0, 0)),))
    with pytest.raises(LayoutMismatch, match=r"w: bfloat16 .* is larger than any memory"):
        logical_tensors([build_layout([spec], shard=0, num_shards=1)])


def test_a_model_of_which_nothing_fits_costs_a_bounded_number_of_loadings() -> None:
    calls = 0

    def load(weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        nonlocal calls
        calls += 1
        for name, _ in weights:
            raise KeyError(name)

    sources = [LogicalTensor(f"layers.{number}", "float32", (2,)) for number in range(4096)]
    found = trace(load, {"w": torch.zeros(2)}, sources).differences
    assert len(found) == MAX_CULPRITS + 1
    assert found[0].startswith("layers.0 ")
    assert found[-1] == "... and more: of 4,096 tensors, those after these were not tried one by one"
    assert calls <= 2 * MAX_CULPRITS + 20


def test_as_many_as_are_found_one_by_one_are_all_named() -> None:
    def load(weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, _ in weights:
            raise KeyError(name)

    sources = [LogicalTensor(f"layers.{number}", "float32", (2,)) for number in range(MAX_CULPRITS)]
    found = trace(load, {"w": torch.zeros(2)}, sources).differences
    assert [text.split(" ")[0] for text in found] == [source.name for source in sources]


def test_the_message_is_bounded_and_the_list_is_not() -> None:
    class Large(ToyMemory):
        def load(self, pairs: Iterable[tuple[str, torch.Tensor]]) -> object:
            for name, tensor in pairs:
                self.loaded[name].copy_(tensor)
            return None

    memory = Large()
    memory.loaded = {f"layers.{number}.{'w' * 200}": torch.zeros(2) for number in range(1000)}
    sources = [LogicalTensor(name, "int32", (2,)) for name in memory.loaded]
    with pytest.raises(LayoutMismatch) as caught:
        fit_logical(memory, sources)
    assert len(caught.value.differences) == 1000
    assert len(str(caught.value)) < 1.1 * MAX_MESSAGE_CHARS
    assert str(caught.value).endswith("more, all in `differences`")
