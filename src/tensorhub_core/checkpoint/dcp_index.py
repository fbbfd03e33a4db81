"""Read the index of a folder that `torch.distributed.checkpoint` wrote: which part of which tensor is in which file.

Pure; no IO. Nothing in an index is trusted: the parts of a tensor must make it up exactly.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from math import prod
from typing import Any

from tensorhub_core.checkpoint.files import is_inside
from tensorhub_core.checkpoint.header import is_name, shown
from tensorhub_core.checkpoint.pickled import Names, Record, counts, damaged, is_count, read_pickle
from tensorhub_core.checkpoint.saved_tensor import DTYPES
from tensorhub_core.errors import ConfigError
from tensorhub_core.layout.regions import intersect

INDEX_FILE = ".metadata"
_MAX_UNRULY = 2048


class _Metadata(Record):
    __slots__ = ()


class _Tensor(Record):
    __slots__ = ()


class _Properties(Record):
    __slots__ = ()


class _Chunk(Record):
    __slots__ = ()


class _Index(Record):
    __slots__ = ()


class _Info(Record):
    __slots__ = ()


class _Unused(Record):
    """What is in an index and not needed here."""

    __slots__ = ()


_METADATA = "torch.distributed.checkpoint.metadata"
_PLANNER = "torch.distributed.checkpoint.planner"
_OLD_METADATA = "torch.distributed._shard.sharded_tensor.metadata"
_MEGATRON = "megatron.core.dist_checkpointing.strategies.torch"
_NAMES: Names = {
    **DTYPES,
    (_METADATA, "Metadata"): _Metadata,
    (_METADATA, "TensorStorageMetadata"): _Tensor,
    (_METADATA, "TensorProperties"): _Properties,
    (_METADATA, "ChunkStorageMetadata"): _Chunk,
    (_METADATA, "MetadataIndex"): _Index,
    (_OLD_METADATA, "TensorProperties"): _Properties,
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"): _Info,
    ("torch", "Size"): tuple,
    ("collections", "OrderedDict"): dict,
    **dict.fromkeys(
        [
            (_METADATA, "BytesStorageMetadata"),
            (_METADATA, "StorageMeta"),
            (_METADATA, "_MEM_FORMAT_ENCODING"),
            (_OLD_METADATA, "MEM_FORMAT_ENCODING"),
            ("torch.serialization", "_get_layout"),
            ("torch.distributed.checkpoint.filesystem", "_StoragePrefix"),
            (_PLANNER, "SavePlan"),
            (_PLANNER, "WriteItem"),
            (_PLANNER, "WriteItemType"),
            (_PLANNER, "TensorWriteData"),
            (_PLANNER, "BytesIOWriteData"),
            (_MEGATRON, "MCoreMetadata"),
            (_MEGATRON, "MCoreSavePlan"),
            ("pathlib", "PosixPath"),
            ("pathlib", "PurePosixPath"),
            ("pathlib", "Path"),
            ("pathlib._local", "PosixPath"),
            ("builtins", "getattr"),  # how some versions of Python name a member of an enumeration
        ],
        _Unused,
    ),
}


@dataclass(frozen=True, slots=True)
class StoredChunk:
    """A part of a tensor: `shape` elements from `offset` on, saved in `length_bytes` of a file from `start_bytes` on.

    Without `file` the index does not say where it is.
    """

    offset: tuple[int, ...]
    shape: tuple[int, ...]
    file: str | None
    start_bytes: int
    length_bytes: int


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor of the index; `path` is where it was in nested dictionaries and lists, (key,) if the index is silent."""

    key: str
    path: tuple[str | int, ...]
    dtype: str
    shape: tuple[int, ...]
    chunks: tuple[StoredChunk, ...]


@dataclass(frozen=True, slots=True)
class DcpIndex:
    """The tensors of a folder, sorted by key, and how many other items it has."""

    tensors: tuple[StoredTensor, ...]
    num_others: int


def parse_index(data: bytes, what: str) -> DcpIndex:
    """Return what an index holds; `what` names it in messages.

    Raises ConfigError if it is damaged, or names a class that an index does not need. Any thread.
    """
    root = read_pickle(data, _NAMES, what)
    items = root.get("state_dict_metadata") if isinstance(root, _Metadata) else None
    if not isinstance(root, _Metadata) or not isinstance(items, dict):
        damaged(what, "it holds something else than the index of a distributed checkpoint")
    places = dict(_places(root.get("storage_data"), what))
    paths = root.get("planner_data")
    _check_parts(items.values(), len(data), what)
    tensors = []
    for key, item in items.items():
        if not isinstance(key, str) or not is_name(key):
            damaged(what, f"a key is a {type(key).__name__}, or no text that can name a tensor")
        if isinstance(item, _Tensor):
            path = paths.get(key) if isinstance(paths, dict) else None
            tensors.append(_tensor(key, _checked_path(path, key), item, places, what))
    return DcpIndex(tuple(sorted(tensors, key=lambda tensor: tensor.key)), len(items) - len(tensors))


def _check_parts(items: Iterable[object], index_bytes: int, what: str) -> None:
    """Refuse more parts than an index of this size can describe: many tensors that share one long list of them."""
    lists = [item.get("chunks") for item in items if isinstance(item, _Tensor)]
    if sum(len(parts) for parts in lists if isinstance(parts, list)) > index_bytes:
        damaged(what, f"its tensors have more parts than its {index_bytes:,} bytes can describe")


_Place = tuple[str, int, int]


def _places(storage: object, what: str) -> Iterator[tuple[tuple[str, tuple[int, ...]], _Place]]:
    """Yield (key, offset) of every part of a tensor, and file, first byte, bytes."""
    if not isinstance(storage, dict):
        damaged(what, "it does not say in which files the tensors are")
    for index, info in storage.items():
        if not isinstance(index, _Index) or not isinstance(info, _Info):
            damaged(what, "it places items with other classes than torch's")
        key, offset = index.get("fqn"), counts(index.get("offset"))
        if offset is None or not isinstance(key, str):
            continue  # not a tensor
        file, start, length = info.get("relative_path"), info.get("offset"), info.get("length")
        if not isinstance(file, str) or not is_inside(file):
            damaged(what, f"a part of {shown(key)} is placed outside the folder")
        if not is_count(start) or not is_count(length):
            damaged(what, f"a part of {shown(key)} has an impossible place")
        if info.get("transform_descriptors"):
            raise ConfigError(
                f"{what}: {shown(key)} was transformed while it was saved, as by compression: save it plain"
            )
        yield (key, offset), (file, start, length)


def _checked_path(path: object, key: str) -> tuple[str | int, ...]:
    if isinstance(path, tuple) and 0 < len(path) <= 64 and all(type(part) in (str, int) for part in path):
        return path
    return (key,)


def _tensor(
    key: str,
    path: tuple[str | int, ...],
    item: Record,
    places: Mapping[tuple[str, tuple[int, ...]], _Place],
    what: str,
) -> StoredTensor:
    properties, shape, listed = item.get("properties"), counts(item.get("size")), item.get("chunks")
    state: Any = properties.state if isinstance(properties, _Properties) else None
    dtype = state[0] if isinstance(state, tuple) and state else properties.get("dtype") if state else None
    if not isinstance(dtype, str) or shape is None or not isinstance(listed, list):
        damaged(what, f"{shown(key)} has no dtype, shape or parts")
    chunks: dict[tuple[tuple[int, ...], tuple[int, ...]], StoredChunk] = {}
    for chunk in listed:
        offset = counts(chunk.get("offsets")) if isinstance(chunk, _Chunk) else None
        size = counts(chunk.get("sizes")) if isinstance(chunk, _Chunk) else None
        if offset is None or size is None or not len(offset) == len(size) == len(shape):
            damaged(what, f"a part of {shown(key)} has an impossible shape")
        if 0 not in size:
            place = places.get((key, offset), (None, 0, 0))
            chunks[offset, size] = StoredChunk(offset, size, *place)
    return StoredTensor(key, path, dtype, shape, tuple(chunks.values()))


def fault_of(tensor: StoredTensor) -> str | None:
    """Return why the parts do not make up the tensor exactly, or where one of them is not placed; None if all is well.

    Savers cut tensors along grids; parts that lie otherwise are compared with each other, if they are not too many.
    """
    parts = [(chunk.offset, tuple(map(sum, zip(chunk.offset, chunk.shape, strict=True)))) for chunk in tensor.chunks]
    if any(end > size for _, hi in parts for end, size in zip(hi, tensor.shape, strict=True)):
        return "a part ends outside of it"
    held, needed = sum(prod(chunk.shape) for chunk in tensor.chunks), prod(tensor.shape)
    if held != needed:
        return f"its parts have {held:,} elements together, it has {needed:,}"
    if not _is_grid(parts, len(tensor.shape)):
        if len(parts) > _MAX_UNRULY:
            return f"its {len(parts):,} parts lie on no grid"
        if any(intersect(one, other) for number, one in enumerate(parts) for other in parts[:number]):
            return "its parts overlap"
    if any(chunk.file is None for chunk in tensor.chunks):
        return "the index does not say in which file a part of it is"
    return None


def _is_grid(parts: Sequence[tuple[tuple[int, ...], tuple[int, ...]]], rank: int) -> bool:
    """Tell whether every part fills a cell of its own of the grid that all their corners make."""
    if len({lo for lo, _ in parts}) != len(parts):
        return False
    following = []
    for axis in range(rank):
        cuts = sorted({corner[axis] for part in parts for corner in part})
        following.append(dict(pairwise(cuts)))
    return all(following[axis][lo[axis]] == hi[axis] for lo, hi in parts for axis in range(rank))


def starts_of(lengths: Sequence[int]) -> list[int]:
    """Return where each of several runs begins when they are put in a row, and the end of the last."""
    return list(accumulate(lengths, initial=0))
