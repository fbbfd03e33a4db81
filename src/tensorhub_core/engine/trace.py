"""Derive the boxes of an engine's tensors from the engine itself: run its own weight loading and record the copies.

The model's `load_weights` gets tensors without memory (device `meta`) and runs under a dispatch mode that records every
copy into a parameter and skips the write, so neither weights nor parameters are touched. What it records is exact by
construction: fusing, sharding, padding and replication are the engine's own arithmetic, not a second version of it.
"""

from __future__ import annotations

import re
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tensorhub_core.engine.assembly import Entry, Fill, assemble
from tensorhub_core.engine.geometry import NotABox, Strided, pieces, region, through
from tensorhub_core.engine.logical import LogicalTensor
from tensorhub_core.layout.casting import Cast, may_cast
from tensorhub_core.layout.types import Box

_ATEN = torch.ops.aten
_COPIES = (_ATEN.clone.default, _ATEN._to_copy.default)
_FILLS = (_ATEN.fill_.Scalar, _ATEN.zero_.default)
_WANTS_MEMORY = re.compile(r"meta tensor|meta device|\bMeta\w+Type\b|unallocated storage|set_data")
"""What torch says of a tensor without memory whose memory is asked for."""
MAX_CULPRITS = 200
"""Tensors that do not fit which are found one by one: each costs a run of the engine's loading, or two."""
LoadWeights = Callable[[Iterable[tuple[str, torch.Tensor]]], object]
Recorded = tuple["_Recorder", object, "Exception | None"]
"""What was recorded, what `load_weights` returned, and what it raised."""


@dataclass(frozen=True)
class Trace:
    """What the engine's loading does with the tensors of a source.

    `tensors`: physical name -> view of the engine's memory; `boxes`: the same names -> boxes in logical coordinates.
    `padding`: views to fill with a constant, once. `untouched`: parameters that get nothing from the source.
    `obstacles`: why loading cannot be expressed in boxes (empty = it can). `differences`: why the source does not fit
    this engine, dtypes included. `loaded`: what `load_weights` returned.
    """

    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    boxes: dict[str, tuple[Box, ...]] = field(default_factory=dict)
    padding: list[tuple[torch.Tensor, float]] = field(default_factory=list)
    untouched: tuple[str, ...] = ()
    obstacles: tuple[str, ...] = ()
    differences: tuple[str, ...] = ()
    loaded: object = None


def trace(
    load: LoadWeights, parameters: Mapping[str, torch.Tensor], sources: Sequence[LogicalTensor], cast: Cast = False
) -> Trace:
    """Record how `load` spreads `sources` over `parameters`, without writing a byte.

    Errors that `load` raises become `differences`, one for each source tensor that causes one; dtypes that `cast` lets
    be converted are none. The engine's loading thread, with its context (distributed groups, current config) set.
    """

    def record(some: Sequence[LogicalTensor]) -> Recorded:
        return _record(load, parameters, some, cast)

    recorder, loaded, error = record(sources)
    if error is not None and not _needs_data(error):
        dtypes = dict(recorder.dtypes)
        shapes = list(islice(_culprits(record, sources, error, dtypes), MAX_CULPRITS + 1))
        if len(shapes) > MAX_CULPRITS:
            shapes[-1] = f"... and more: of {len(sources):,} tensors, those after these were not tried one by one"
        return Trace(differences=(*shapes, *dtypes.values()))
    if error is not None:
        return Trace(obstacles=(_told(error),), differences=tuple(recorder.dtypes.values()))
    result = Trace(loaded=loaded)
    obstacles = list(recorder.obstacles)
    untouched = []
    for name, target in recorder.targets.items():
        if not target.entries and not target.fills:
            untouched.append(name)
            continue
        found = assemble(name, target.base.sizes, target.entries, target.fills)
        obstacles += found.obstacles
        for part in found.parts:
            result.tensors[part.name] = part.view.of(target.tensor)
            result.boxes[part.name] = part.boxes
        for start, shape, value in found.padding:
            result.padding.append((_slice(target.tensor, start, shape), value))
    return replace(
        result,
        untouched=tuple(untouched),
        obstacles=tuple(dict.fromkeys(obstacles)),
        differences=tuple(recorder.dtypes.values()),
    )


def _slice(tensor: torch.Tensor, start: tuple[int, ...], shape: tuple[int, ...]) -> torch.Tensor:
    return tensor[tuple(slice(at, at + size) for at, size in zip(start, shape, strict=True))]


def _record(
    load: LoadWeights, parameters: Mapping[str, torch.Tensor], sources: Sequence[LogicalTensor], cast: Cast
) -> Recorded:
    recorder = _Recorder(parameters, sources, cast)
    loaded, error = None, None
    try:
        with recorder:
            loaded = load(iter(recorder.stream()))
    except Exception as caught:  # a model's loader may raise anything; which tensor it was is found by `_culprits`
        error = caught
    recorder.restore(parameters)
    return recorder, loaded, error


def _needs_data(error: Exception) -> bool:
    """Tell whether the loader wants to see or exchange memory, which tracing has none of."""
    return isinstance(error, NotImplementedError) or _WANTS_MEMORY.search(str(error)) is not None


def _told(error: Exception) -> str:
    """Return the loader's own words, or the line that failed if it has none."""
    text = str(error).strip()
    if not text:
        frames = traceback.extract_tb(error.__traceback__)
        text = frames[-1].line or "" if frames else ""
    return text if text and not isinstance(error, KeyError) else f"{type(error).__name__}: {text}"


def _culprits(
    record: Callable[[Sequence[LogicalTensor]], Recorded],
    sources: Sequence[LogicalTensor],
    error: Exception,
    dtypes: dict[str, str],
) -> Iterable[str]:
    """Halve the sources until each tensor that makes loading fail stands alone; yield one line for each.

    Differences in dtype that are seen on the way are added to `dtypes`.
    """
    if len(sources) == 1:
        (source,) = sources
        yield f"{source.name} {source.dtype}{list(source.shape)}: {_told(error)}"
        return
    middle = len(sources) // 2
    alone = True
    for half in (sources[:middle], sources[middle:]):
        recorder, _, caught = record(half)
        dtypes.update(recorder.dtypes)
        if caught is not None:
            alone = False
            yield from _culprits(record, half, caught, dtypes)
    if alone:
        yield _told(error)


@dataclass
class _Target:
    """One parameter's memory and what was recorded for it."""

    tensor: torch.Tensor
    base: Strided
    entries: list[Entry] = field(default_factory=list)
    fills: list[Fill] = field(default_factory=list)
    order: int = 0


@dataclass(frozen=True)
class _Origin:
    """A tensor without memory: a source, or a copy of a view of another one.

    `dtypes`: those that its values have gone through, its own at the end.
    """

    base: Strided
    dtypes: tuple[torch.dtype, ...]
    source: LogicalTensor | None = None
    parent: int = 0
    view: Strided | None = None


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Record copies and fills of parameters while `load_weights` runs."""

    def __init__(self, parameters: Mapping[str, torch.Tensor], sources: Sequence[LogicalTensor], cast: Cast) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._cast = cast
        self.targets: dict[str, _Target] = {}
        self.obstacles: list[str] = []
        self.dtypes: dict[str, str] = {}
        self._by_storage: dict[int, list[str]] = {}
        self._saved = {name: parameter.data for name, parameter in parameters.items()}
        for name, tensor in self._saved.items():
            key = _storage(tensor)
            same = [
                other for other in self._by_storage.get(key, ()) if _strided(self._saved[other]) == _strided(tensor)
            ]
            if tensor.numel() == 0 or same:
                continue
            self.targets[name] = _Target(tensor, _strided(tensor))
            self._by_storage.setdefault(key, []).append(name)
        self._sources = [
            (source, torch.empty(source.shape, dtype=getattr(torch, source.dtype), device="meta")) for source in sources
        ]
        self._origins = {
            _storage(tensor): _Origin(_strided(tensor), (tensor.dtype,), source) for source, tensor in self._sources
        }
        self._alive: list[torch.Tensor] = []
        self._order = 0

    def stream(self) -> Iterable[tuple[str, torch.Tensor]]:
        """Yield (name, tensor without memory) of every source."""
        return ((source.name, tensor) for source, tensor in self._sources)

    def restore(self, parameters: Mapping[str, torch.Tensor]) -> None:
        """Put back parameters whose memory the loader exchanged, and count that as an obstacle."""
        for name, parameter in parameters.items():
            saved = self._saved[name]
            if _storage(parameter) != _storage(saved):
                self.obstacles.append(f"{name}: the loader exchanges the parameter's memory")
                parameter.data = saved

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is _ATEN.copy_.default and (names := self._by_storage.get(_storage(args[0]))):
            self._copy(names, args[0], args[1])
            return args[0]
        if func in _FILLS and (names := self._by_storage.get(_storage(args[0]))):
            self._fill(names, args[0], float(args[1]) if len(args) > 1 else 0.0)
            return args[0]
        if func in _COPIES and _storage(args[0]) in self._origins:
            dtype = kwargs.get("dtype") or args[0].dtype
            if self._follows(args[0], dtype):
                return self._derive(args[0], kwargs.get("memory_format") or torch.preserve_format, dtype)
            return torch.empty_like(args[0], dtype=dtype, device="meta")
        if func._schema.is_mutable and (written := self._written(func, args, kwargs)) is not None:
            return written
        return func(*args, **kwargs)

    def _follows(self, view: torch.Tensor, dtype: torch.dtype) -> bool:
        """Tell whether a copy of a view is followed: other conversions than from float to float are computing."""
        if view.dtype != self._origins[_storage(view)].dtypes[-1] or _is_lazy(view):
            return False
        return dtype == view.dtype or may_cast(True, _name(view.dtype), _name(dtype))

    def _derive(self, view: torch.Tensor, memory_format: torch.memory_format, dtype: torch.dtype) -> torch.Tensor:
        """Answer a copy of a tensor without memory by another one that remembers what it is a copy of."""
        copy = torch.empty_like(view, dtype=dtype, device="meta", memory_format=memory_format)
        self._alive += [view, copy]
        dtypes = _gone_through(self._origins[_storage(view)].dtypes, dtype)
        self._origins[_storage(copy)] = _Origin(_strided(copy), dtypes, None, _storage(view), _strided(view))
        return copy

    def _written(self, func: Any, args: Any, kwargs: Any) -> torch.Tensor | None:
        """Return the parameter's view that any other operation would write, after noting the obstacle.

        A tensor without memory that is written is from then on one that the loader computed.
        """
        for tensor in _written_by(func, args, kwargs):
            if names := self._by_storage.get(_storage(tensor)):
                self.obstacles.append(f"{names[0]}: the loader writes it with {func}")
                return tensor
            if torch.Tag.inplace_view not in func.tags:
                self._origins.pop(_storage(tensor), None)
        return None

    def _target(self, names: list[str], view: torch.Tensor) -> _Target | None:
        """Return the parameter that a view of its storage lies in."""
        for name in names:
            target = self.targets[name]
            try:
                region(target.base, _strided(view))
            except NotABox:
                continue
            return target
        self.obstacles.append(f"{names[0]}: the loader writes a view that is not made of boxes of it")
        return None

    def _copy(self, names: list[str], dest: torch.Tensor, source: torch.Tensor) -> None:
        target = self._target(names, dest)
        if target is None or dest.numel() == 0:
            return
        if source.shape != dest.shape:
            torch.empty(source.shape, device="meta").expand(dest.shape)  # raises if the copy would
        self._order += 1
        try:
            self._check_dtypes(source, dest, target)
            for logical, piece in self._resolve(_storage(source), _strided(source), target.base, _strided(dest)):
                target.entries.append(Entry(logical, piece, self._order))
                self._compare(logical, _name(dest.dtype))
        except NotABox as reason:
            self.obstacles.append(f"{names[0]}: {reason}")

    def _check_dtypes(self, source: torch.Tensor, dest: torch.Tensor, target: _Target) -> None:
        """Raise NotABox unless values arrive as they are, or after one conversion into the parameter's dtype."""
        origin = self._origins.get(_storage(source))
        if dest.dtype != target.tensor.dtype or (origin is not None and source.dtype != origin.dtypes[-1]):
            raise NotABox("the loader takes the bytes of one dtype for another one's")
        if any(_is_lazy(tensor) for tensor in (source, dest)):
            raise NotABox("the loader takes its values negated or conjugated")
        if origin is not None and len(_gone_through(origin.dtypes, dest.dtype)) > 2:
            raise NotABox("the loader converts it more than once")

    def _compare(self, logical: LogicalTensor, dtype: str) -> None:
        if logical.dtype != dtype and not may_cast(self._cast, logical.dtype, dtype):
            text = f"dtype of {logical.name!r}: the engine has {dtype}, the version has {logical.dtype}"
            hint = ', which `"cast": true` would convert' if may_cast(True, logical.dtype, dtype) else ""
            self.dtypes[logical.name] = text + hint

    def _resolve(
        self, storage: int, source: Strided, base: Strided, dest: Strided
    ) -> Iterable[tuple[LogicalTensor, Any]]:
        origin = self._origins.get(storage)
        if origin is None:
            raise NotABox("the loader computes what it copies instead of taking it from the source")
        for piece in pieces(origin.base, source, base, dest):
            if origin.source is not None:
                yield origin.source, piece
            else:
                assert origin.view is not None
                yield from self._resolve(origin.parent, *_swap(through(piece, origin.view, base), base))

    def _fill(self, names: list[str], dest: torch.Tensor, value: float) -> None:
        target = self._target(names, dest)
        if target is None or dest.numel() == 0:
            return
        if dest.dtype != target.tensor.dtype:
            self.obstacles.append(f"{names[0]}: the loader takes the bytes of one dtype for another one's")
            return
        self._order += 1
        target.fills += [Fill(start, shape, value, self._order) for start, shape in region(target.base, _strided(dest))]


def _is_lazy(view: torch.Tensor) -> bool:
    """Tell whether the values of a view are others than its bytes."""
    return view.is_neg() or view.is_conj()


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _written_by(func: Any, args: Any, kwargs: Any) -> Iterator[torch.Tensor]:
    """Yield every tensor that a call of an operation writes."""
    for place, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[place] if place < len(args) else kwargs.get(argument.name)
            for tensor in value if isinstance(value, list | tuple) else (value,):
                if isinstance(tensor, torch.Tensor):
                    yield tensor


def _gone_through(dtypes: tuple[torch.dtype, ...], last: torch.dtype) -> tuple[torch.dtype, ...]:
    return dtypes if dtypes[-1] == last else (*dtypes, last)


def _swap(views: tuple[Strided, Strided], base: Strided) -> tuple[Strided, Strided, Strided]:
    return views[0], base, views[1]


def _storage(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _strided(tensor: torch.Tensor) -> Strided:
    return Strided(int(tensor.storage_offset()), tuple(tensor.shape), tuple(tensor.stride()))
