"""Find out how an engine's memory is filled: by boxes if its own loading is made of copies, else by that loading."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Protocol

import torch

from tensorhub_core.client.observer import Held
from tensorhub_core.engine.logical import LogicalTensor, logical_tensors
from tensorhub_core.engine.trace import trace
from tensorhub_core.errors import LayoutMismatch
from tensorhub_core.layout.casting import Cast
from tensorhub_core.layout.match import listing
from tensorhub_core.layout.types import IDENTITY_TAG, Box, Layout

_BOXES, _STREAMED, _FAILED = "boxes", "streamed: ", "failed: "


class EngineMemory(Protocol):
    """One rank's weights as the engine loads them, before its post-load processing."""

    @property
    def key(self) -> str:
        """Return a name that two engines share only if their memory is laid out alike."""

    @property
    def in_place(self) -> bool:
        """Tell whether processing rewrites the very memory that is filled."""

    def parameters(self) -> Mapping[str, torch.Tensor]:
        """Return the tensors that loading fills, by the engine's names."""

    def load(self, weights: Iterable[tuple[str, torch.Tensor]]) -> object:
        """Run the engine's own loading of (logical name, whole tensor) pairs into `parameters()`."""

    def missing(self, untouched: Sequence[str]) -> Sequence[str]:
        """Name those of `untouched` that have to come from the source."""

    def borrowed(self) -> AbstractContextManager[None]:
        """Let the model have its loaded form inside the block, and what it computes with again after it."""

    def process(self) -> None:
        """Make the engine compute with what `parameters()` hold now."""


@dataclass
class Fit:
    """How one rank's memory is described to the hub.

    `boxes`: physical name -> boxes; None: the bytes are those of engines with the same `tag` only. `streamed`: they
    come through the engine's own loading of `sources`. `note` says so to users. `cast`: which dtypes may be converted.
    """

    tensors: Mapping[str, torch.Tensor]
    boxes: Mapping[str, Sequence[Box]] | None = None
    padding: Sequence[tuple[torch.Tensor, float]] = ()
    tag: str = IDENTITY_TAG
    streamed: bool = False
    note: str = ""
    sources: Sequence[LogicalTensor] = field(default_factory=list)
    cast: Cast = False

    @property
    def total_bytes(self) -> int:
        """Return the bytes that are registered; tensors that share memory count once."""
        shares = {(tensor.data_ptr(), tensor.nbytes) for tensor in self.tensors.values()}
        return sum(size for _, size in shares)

    def fill_padding(self) -> None:
        """Write the constants that the engine's own loading writes where no tensor lies."""
        for view, value in self.padding:
            view.fill_(value)

    def check(self, memory: EngineMemory, sources: Sequence[LogicalTensor]) -> None:
        """Raise LayoutMismatch unless loading these tensors fills the memory just as it was described."""
        if sources == self.sources:
            return
        with memory.borrowed():
            other = fit_logical(memory, sources, self.cast)
        if other.boxes != self.boxes:
            raise LayoutMismatch("this version's tensors would be laid out differently in the engine: restart it")
        self.sources = sources


def fit(memory: EngineMemory, held: Sequence[Held], cast: Cast = False) -> Fit:
    """Describe the memory so that it can be filled from one of the replicas that hold a version.

    Raises LayoutMismatch listing all differences if no replica's tensors fit this engine. Loading thread.
    """
    mismatch: LayoutMismatch | None = None
    for layouts in _by_preference(held):
        try:
            return fit_logical(memory, logical_tensors(layouts), cast)
        except LayoutMismatch as error:
            mismatch = mismatch or error
    tag = _loaded(memory)
    if any(row.layout.tag == tag for row in held):
        return Fit(dict(memory.parameters()), tag=tag, note="filled from engines of the same configuration only")
    tags = sorted({row.layout.tag for row in held if row.layout.tag})
    raise mismatch or LayoutMismatch(
        f"the version is only held in processed forms ({', '.join(tags)}), this engine is {memory.key}", tuple(tags)
    )


def fit_logical(memory: EngineMemory, sources: Sequence[LogicalTensor], cast: Cast = False) -> Fit:
    """Describe the memory so that it can be filled from these logical tensors; errors as of `fit`."""
    traced = trace(memory.load, memory.parameters(), sources, cast)
    differences = list(traced.differences)
    if not traced.obstacles:
        differences += [f"missing: the version has nothing for {name!r}" for name in memory.missing(traced.untouched)]
    if differences:
        raise listing("the version does not fit this engine", differences)
    if traced.obstacles:
        note = "streamed in pieces through the engine's own loading: " + "; ".join(traced.obstacles[:3])
        parameters, tag = dict(memory.parameters()), _loaded(memory)
        return Fit(parameters, tag=tag, streamed=True, note=note, sources=sources, cast=cast)
    return Fit(traced.tensors, traced.boxes, traced.padding, sources=sources, cast=cast)


def agreed(memory: EngineMemory, describe: Callable[[], Fit], from_all_ranks: Callable[[str], Sequence[str]]) -> Fit:
    """Describe the memory in one way on all ranks of an engine: by boxes only if none of them has to stream.

    A loader may copy on one rank what it computes on another, such as a bias that only the first one adds; those that
    fill by boxes and those that stream would wait for each other in different rounds. `from_all_ranks` returns what
    every rank says; all of them have to call this. Raises what `describe` raises, LayoutMismatch where another rank
    failed. Loading thread.
    """
    found, failure, said = None, None, _BOXES
    try:
        found = describe()
        said = f"{_STREAMED}{found.note}" if found.streamed else _BOXES
    except Exception as error:
        failure, said = error, f"{_FAILED}{error}"
    told = from_all_ranks(said)
    if failure is not None:
        raise failure
    assert found is not None
    failed = [text.removeprefix(_FAILED) for text in told if text.startswith(_FAILED)]
    if failed:
        raise LayoutMismatch(f"another rank of this engine cannot be filled: {failed[0]}")
    notes = [text.removeprefix(_STREAMED) for text in told if text.startswith(_STREAMED)]
    if not notes or found.streamed:
        return found
    if not found.sources:
        raise LayoutMismatch("the ranks of this engine found the version in different forms: try again")
    parameters, tag = dict(memory.parameters()), _loaded(memory)
    return Fit(parameters, tag=tag, streamed=True, note=notes[0], sources=found.sources, cast=found.cast)


def _loaded(memory: EngineMemory) -> str:
    return f"loaded:{memory.key}"


def _by_preference(held: Sequence[Held]) -> list[list[Layout]]:
    """Return the complete replicas in plain bytes, those with fewer shards first: they name the most tensors.

    Behind them those in other dtypes than the publisher's, which are read when there are no others.
    """
    replicas: dict[str, list[Held]] = {}
    for row in held:
        replicas.setdefault(row.replica, []).append(row)
    whole = [
        rows
        for _, rows in sorted(replicas.items())
        if len(rows) == rows[0].num_shards and all(row.layout.tag == IDENTITY_TAG for row in rows)
    ]

    def cost(rows: list[Held]) -> tuple[bool, bool, int]:
        return any(row.converted for row in rows), any(spec.boxes for spec in rows[0].layout.tensors), len(rows)

    return [[row.layout for row in rows] for rows in sorted(whole, key=cost)]
