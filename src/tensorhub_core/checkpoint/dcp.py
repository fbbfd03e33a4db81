"""Open a folder that `torch.distributed.checkpoint` wrote, without copying it.

Every part of a tensor that was saved is a tensor of its own, with a box that says where in the whole one it lies.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise, takewhile
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from tensorhub_core.checkpoint.dcp_index import (
    INDEX_FILE,
    DcpIndex,
    StoredChunk,
    StoredTensor,
    fault_of,
    parse_index,
    starts_of,
)
from tensorhub_core.checkpoint.files import (
    Checkpoint,
    CopyProgress,
    Extent,
    copied,
    existing_folder,
    file_size,
    map_file,
    read_small,
    shifted,
    warm,
)
from tensorhub_core.checkpoint.header import shown
from tensorhub_core.checkpoint.saved_tensor import SavedTensor, gathered, locate
from tensorhub_core.client.tensors import RawTensor
from tensorhub_core.errors import ConfigError
from tensorhub_core.layout.types import Box

_MAX_INDEX_BYTES = 2 << 30
_MAX_NAMED = 8

_WRAPPERS = re.compile(r"(?:^|(?<=\.))(?:_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\.")
_OPTIMIZER = r"(?:optim|optimizer)s?(?:_?\d+)?(?:_states?)?(?:_dict)?"
_NOT_WEIGHTS = re.compile(
    rf"{_OPTIMIZER}|(?:lr_scheduler|scheduler|rng|dataloader|grad_scaler|scaler)s?(?:_?\d+)?(?:_states?)?(?:_dict)?"
    r"|(?:opt|train)_states?"
)
_OPTIMIZER_KEY = re.compile(rf"{_OPTIMIZER}\..+")


@dataclass(frozen=True, slots=True)
class Piece:
    """One saved part of a tensor, and its bytes: u8 [bytes] in C order of `chunk.shape`."""

    tensor: StoredTensor
    chunk: StoredChunk
    data: NDArray[np.uint8]

    @property
    def name(self) -> str:
        """Return a name that no other part of the folder has: the key, and for one of several parts its offset."""
        if self.chunk.shape == self.tensor.shape:
            return self.tensor.key
        return f"{self.tensor.key}[{','.join(map(str, self.chunk.offset))}]"


def open_dcp(
    directory: str | os.PathLike[str],
    *,
    prefix: str | None = None,
    names: Mapping[str, str | None] | None = None,
    copy: bool = False,
    progress: CopyProgress | None = None,
) -> Checkpoint:
    """Open the weights in a folder of `torch.distributed.checkpoint`; optimizers and the like are left out.

    A tensor is served under its key in the model's own state dict. `prefix` takes only keys that begin with it, and
    leaves it off; needed where the folder holds several models. `names` gives keys other names, or None to leave
    a tensor out. `copy` and `progress` are `open_checkpoint`'s. Raises ConfigError naming the file, the tensor, or the
    class that an index must not name.
    """
    folder = existing_folder(directory)
    index = read_index(folder)
    chosen = choose_weights(index.tensors, str(folder), prefix, names)
    pieces = open_pieces(folder, [tensor for tensor in index.tensors if tensor.key in chosen], copy, progress)
    tensors, boxes = [], {}
    for piece in pieces:
        name = chosen[piece.tensor.key]
        served = name + piece.name.removeprefix(piece.tensor.key)
        tensors.append(RawTensor(served, piece.tensor.dtype, piece.chunk.shape, piece.data))
        if served != name:
            boxes[served] = (Box(name, piece.chunk.offset, piece.chunk.shape, (0,) * len(piece.chunk.shape)),)
    return checkpoint_of(folder, pieces, tensors, boxes, left_out=index.num_others + len(index.tensors) - len(chosen))


def read_index(folder: Path) -> DcpIndex:
    """Return what the folder holds; raises ConfigError if its index is missing, damaged or hostile."""
    path = folder / INDEX_FILE
    return parse_index(read_small(path, _MAX_INDEX_BYTES), str(path))


def checkpoint_of(
    folder: Path,
    pieces: Sequence[Piece],
    tensors: Iterable[RawTensor],
    boxes: Mapping[str, tuple[Box, ...]],
    left_out: int,
) -> Checkpoint:
    """Return the checkpoint that pieces make, under the names and with the boxes that they were given.

    Raises ConfigError without any, or for two of one name.
    """
    ordered = tuple(sorted(tensors, key=lambda tensor: tensor.name))
    if not ordered:
        raise ConfigError(f"{folder} has no weights")
    for one, other in pairwise(ordered):
        if one.name == other.name:
            raise ConfigError(f"{folder}: two tensors would be served as {shown(one.name)}")
    files = sorted({folder / piece.chunk.file for piece in pieces if piece.chunk.file is not None})
    return Checkpoint(folder, tuple(files), ordered, sum(piece.data.nbytes for piece in pieces), boxes, left_out)


def choose_weights(
    tensors: Sequence[StoredTensor], where: str, prefix: str | None, names: Mapping[str, str | None] | None
) -> dict[str, str]:
    """Return the name to serve by the key of each tensor that is a weight of the one model."""
    names = dict(names or {})
    if prefix is not None:
        start = f"{prefix.removesuffix('.')}."
        found = {tensor.key: tensor.key[len(start) :] for tensor in tensors if tensor.key.startswith(start)}
        if not found:
            raise ConfigError(f"{where} has no tensor whose key begins with {shown(start)}")
    else:
        found = _of_one_model(tensors, where)
    found = _unwrapped(found)
    for key in [key for key in found if key in names]:
        name = names.pop(key)
        if name is None:
            del found[key]
        else:
            found[key] = name
    if names:
        raise ConfigError(f"{where} has no weights with the keys that names are given for: {_listed(names)}")
    return found


def _of_one_model(tensors: Sequence[StoredTensor], where: str) -> dict[str, str]:
    """Return names as the model's state dict had them, whatever that was nested in."""
    weights = [tensor for tensor in tensors if not _is_other(tensor)]
    nested = Counter(tensor.path[0] if len(tensor.path) > 1 else None for tensor in weights)
    if len(nested) > 1:
        groups = ", ".join(f"{'no group' if name is None else shown(name)} ({count})" for name, count in nested.items())
        raise ConfigError(f"{where} has tensors in several groups: {groups}; give the prefix of those that are wanted")
    depth = 0
    if None not in nested and weights:
        levels = zip(*(tensor.path[:-1] for tensor in weights), strict=False)
        depth = sum(1 for _ in takewhile(lambda level: len(set(level)) == 1, levels))
    return {tensor.key: ".".join(map(str, tensor.path[depth:])) for tensor in weights}


def _is_other(tensor: StoredTensor) -> bool:
    if len(tensor.path) == 1:
        return _OPTIMIZER_KEY.fullmatch(tensor.key) is not None
    return any(_NOT_WEIGHTS.fullmatch(str(group)) for group in tensor.path[:-1])


def _unwrapped(names: Mapping[str, str]) -> dict[str, str]:
    """Take off what wrappers of modules put in front of names; a model inside a module `model` is one, too."""
    plain = {key: _WRAPPERS.sub("", name) for key, name in names.items()}
    for start, is_wrapper in (("module.", True), ("model.", any(n.startswith("model.model.") for n in plain.values()))):
        if is_wrapper and plain and all(name.startswith(start) for name in plain.values()):
            plain = {key: name.removeprefix(start) for key, name in plain.items()}
    return plain


def open_pieces(
    folder: Path, tensors: Iterable[StoredTensor], copy: bool = False, progress: CopyProgress | None = None
) -> list[Piece]:
    """Return the saved parts of `tensors`, which must make them up exactly; their bytes lie in the mapped files.

    Parts that were saved with gaps between their elements are copied. `copy` and `progress` are `open_checkpoint`'s.
    Raises ConfigError naming all tensors that are incomplete, or the file that is missing or cut off.
    """
    tensors = list(tensors)
    faults = {tensor.key: fault for tensor in tensors if (fault := fault_of(tensor)) is not None}
    if faults:
        what = "; ".join(f"{shown(key)}: {fault}" for key, fault in list(faults.items())[:_MAX_NAMED])
        raise ConfigError(f"{folder / INDEX_FILE}: {len(faults)} tensors are incomplete: {what}")
    files: dict[str, NDArray[np.uint8]] = {}
    found: list[tuple[Piece, Extent | None]] = []
    for tensor in tensors:
        for chunk in tensor.chunks:
            assert chunk.file is not None
            if chunk.file not in files:
                files[chunk.file] = _map(folder, chunk.file)
            found.append(_piece(folder, tensor, chunk, files[chunk.file]))
        if not tensor.chunks:
            empty = StoredChunk((0,) * len(tensor.shape), tensor.shape, None, 0, 0)
            found.append((Piece(tensor, empty, np.empty(0, np.uint8)), None))
    return _read(found, copy, progress)


def _map(folder: Path, name: str) -> NDArray[np.uint8]:
    path = folder / name
    size = file_size(path, folder / INDEX_FILE)
    try:
        with path.open("rb") as file:
            return map_file(path, file.fileno(), size)
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from None


def _piece(
    folder: Path, tensor: StoredTensor, chunk: StoredChunk, file: NDArray[np.uint8]
) -> tuple[Piece, Extent | None]:
    """Return a part, and where in its file it lies in a row."""
    path = folder / str(chunk.file)
    end = chunk.start_bytes + chunk.length_bytes
    if end > file.nbytes:
        raise ConfigError(f"{path} is cut off: {shown(tensor.key)} ends at byte {end:,}, the file has {file.nbytes:,}")
    what = f"{path}: tensor {shown(tensor.key)}"
    archive = file[chunk.start_bytes : end]
    saved = locate(archive, what)
    if saved.dtype != tensor.dtype or not _same_shape(saved, chunk.shape):
        raise ConfigError(
            f"{what} is {saved.dtype} {saved.shape} in its file, the index says {tensor.dtype} {chunk.shape}"
        )
    if not saved.contiguous:
        return Piece(tensor, chunk, gathered(archive, saved)), None
    data = archive[saved.start_bytes : saved.start_bytes + saved.length_bytes]
    return Piece(tensor, chunk, data), Extent(path, chunk.start_bytes + saved.start_bytes, data.nbytes)


def _same_shape(saved: SavedTensor, shape: tuple[int, ...]) -> bool:
    """Compare shapes but for leading axes of size 1, which Megatron adds to the index alone."""
    spare = len(shape) - len(saved.shape)
    return spare >= 0 and shape == (1,) * spare + saved.shape


def _read(found: Sequence[tuple[Piece, Extent | None]], copy: bool, progress: CopyProgress | None) -> list[Piece]:
    """Read what lies in files, in the order in which it lies there: to keep it if `copy`, else to have it at hand."""
    pieces = [piece for piece, _ in found]
    if not copy and progress is None:
        return pieces
    extents = [(extent, number) for number, (_, extent) in enumerate(found) if extent is not None]
    extents.sort(key=lambda item: (item[0].path, item[0].offset_bytes))
    starts = starts_of([extent.length_bytes for extent, _ in extents])
    for (extent, number), before in zip(extents, starts, strict=False):
        hear = shifted(progress, before, starts[-1])
        try:
            if copy:
                pieces[number] = Piece(pieces[number].tensor, pieces[number].chunk, copied(extent, hear))
            elif hear is not None:
                warm(extent, hear)
        except OSError as error:
            raise ConfigError(f"cannot read {extent.path}: {error.strerror}") from None
    return pieces


def _listed(names: Iterable[str]) -> str:
    texts = [shown(name) for name in names]
    return ", ".join(texts[:_MAX_NAMED]) + (f" and {len(texts) - _MAX_NAMED} more" if len(texts) > _MAX_NAMED else "")
