"""Open a Hugging Face safetensors directory without copying it: every tensor is a view of a memory-mapped file."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from tensorhub_core.checkpoint.files import (
    Checkpoint,
    CopyProgress,
    Extent,
    copied,
    existing_folder,
    file_size,
    is_inside,
    map_file,
    read_small,
    shifted,
    warm,
)
from tensorhub_core.checkpoint.header import (
    PREFIX_BYTES,
    Entry,
    header_length,
    parse_header,
    parse_json_object,
    shown,
)
from tensorhub_core.client.tensors import RawTensor
from tensorhub_core.errors import ConfigError

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
_MAX_INDEX_BYTES = 256 << 20


@dataclass(frozen=True, slots=True)
class _File:
    path: Path
    entries: tuple[Entry, ...]
    memory: NDArray[np.uint8]


def open_checkpoint(
    directory: str | os.PathLike[str], *, copy: bool = False, progress: CopyProgress | None = None
) -> Checkpoint:
    """Open the checkpoint in `directory`: `model.safetensors`, or the files that its index names.

    `copy=True` reads the files into memory of the process, which later changes on disk cannot reach. Otherwise, with
    `progress`, they are read once, so that they are in the system's memory when the bytes are needed. `progress` hears
    of the reading. Raises ConfigError naming the file and the tensor that is wrong.
    """
    folder = existing_folder(directory)
    paths, index = _find_files(folder)
    sizes = [file_size(path, path.parent / INDEX_FILE) for path in paths]
    files: list[_File] = []
    for path, done in zip(paths, np.cumsum([0, *sizes]).tolist(), strict=False):
        files.append(_open_file(path, copy, shifted(progress, done, sum(sizes))))
    _check_names(folder, index, files)
    tensors = sorted((tensor for file in files for tensor in _views(file)), key=lambda tensor: tensor.name)
    if not tensors:
        raise ConfigError(f"{folder} has no tensors")
    return Checkpoint(folder, tuple(paths), tuple(tensors), sum(tensor.buffer.nbytes for tensor in tensors))


def _find_files(folder: Path) -> tuple[list[Path], dict[str, str] | None]:
    index_path = folder / INDEX_FILE
    if os.path.exists(index_path):
        index = _read_index(index_path)
        return [folder / name for name in sorted(set(index.values()))], index
    if os.path.exists(folder / SINGLE_FILE):
        return [folder / SINGLE_FILE], None
    found = sorted(folder.glob("*.safetensors"))
    if len(found) == 1:
        return found, None
    if found:
        raise ConfigError(
            f"{folder} has {len(found)} safetensors files but no {INDEX_FILE}, so nothing says that they are complete"
        )
    raise ConfigError(f"{folder} has no {SINGLE_FILE} and no {INDEX_FILE}")


def _read_index(path: Path) -> dict[str, str]:
    data = read_small(path, _MAX_INDEX_BYTES)
    names = parse_json_object(data, str(path)).get("weight_map")
    if not isinstance(names, dict) or not all(isinstance(file, str) for file in names.values()):
        raise ConfigError(f"{path} has no weight_map from tensor names to file names")
    if not names:
        raise ConfigError(f"{path}: its weight_map names no tensor")
    for tensor, file in names.items():
        if not is_inside(file):
            raise ConfigError(f"{path}: tensor {shown(tensor)} is placed outside the directory: {shown(file)}")
    return names


def _open_file(path: Path, copy: bool, progress: CopyProgress | None) -> _File:
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            length = header_length(file.read(64), size, str(path))
            file.seek(PREFIX_BYTES)
            entries = parse_header(file.read(length), size, str(path))
            if copy:
                return _File(path, entries, copied(Extent(path, 0, size), progress))
            if progress is not None:
                warm(Extent(path, 0, size), progress)
            return _File(path, entries, map_file(path, file.fileno(), size))
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from None


def _views(file: _File) -> list[RawTensor]:
    return [
        RawTensor(
            entry.name,
            entry.dtype,
            entry.shape,
            file.memory[entry.offset_bytes : entry.offset_bytes + entry.length_bytes],
        )
        for entry in file.entries
    ]


def _check_names(folder: Path, index: dict[str, str] | None, files: list[_File]) -> None:
    owners: dict[str, Path] = {}
    for file in files:
        for entry in file.entries:
            owner = owners.setdefault(entry.name, file.path)
            if owner != file.path:
                raise ConfigError(f"tensor {shown(entry.name)} is in both {owner} and {file.path}")
    for name, place in (index or {}).items():
        path, owner_path = folder / place, owners.get(name)
        if owner_path != path:
            where = "no file has it" if owner_path is None else f"it is in {owner_path}"
            raise ConfigError(f"{folder / INDEX_FILE} places tensor {shown(name)} in {path}, but {where}")
