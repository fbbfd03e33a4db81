"""Open a Hugging Face safetensors directory without copying it: every tensor is a view of a memory-mapped file.

The mapping is private and writable although nothing writes to it: network cards register memory for writing, which a
read-only mapping refuses. A file that changes on disk shows through; readers' checksums catch it. A file that is cut
off on disk ends the process that serves it, so replace files instead of rewriting them, or open with `copy=True`.
"""

from __future__ import annotations

import mmap
import os
import stat
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import numpy as np
from numpy.typing import NDArray

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
_CHUNK_BYTES = 16 << 20
_NO_RESERVE: int = getattr(mmap, "MAP_NORESERVE", 0)

CopyProgress = Callable[[int, int], None]
"""Called with (done_bytes, total_bytes)."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A validated checkpoint: `tensors` are sorted by name, their buffers views of the mapped `files`.

    The mappings live as long as a view of them.
    """

    directory: Path
    files: tuple[Path, ...]
    tensors: tuple[RawTensor, ...]
    total_bytes: int


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
    folder = Path(directory)
    if not folder.is_dir():
        what = "is not a directory" if folder.exists() else "does not exist"
        raise ConfigError(f"checkpoint directory {folder} {what}")
    paths, index = _find_files(folder)
    sizes = [_size(path) for path in paths]
    files: list[_File] = []
    for path, done in zip(paths, np.cumsum([0, *sizes]).tolist(), strict=False):
        files.append(_open_file(path, copy, _shifted(progress, done, sum(sizes))))
    _check_names(folder, index, files)
    tensors = sorted((tensor for file in files for tensor in _views(file)), key=lambda tensor: tensor.name)
    if not tensors:
        raise ConfigError(f"{folder} has no tensors")
    return Checkpoint(folder, tuple(paths), tuple(tensors), sum(tensor.buffer.nbytes for tensor in tensors))


def _find_files(folder: Path) -> tuple[list[Path], dict[str, str] | None]:
    index_path = folder / INDEX_FILE
    if index_path.exists():
        index = _read_index(index_path)
        return [folder / name for name in sorted(set(index.values()))], index
    if (folder / SINGLE_FILE).exists():
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
    size = _size(path)
    if size > _MAX_INDEX_BYTES:
        raise ConfigError(f"{path} is larger than any index: {size:,} bytes")
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from None
    names = parse_json_object(data, str(path)).get("weight_map")
    if not isinstance(names, dict) or not all(isinstance(file, str) for file in names.values()):
        raise ConfigError(f"{path} has no weight_map from tensor names to file names")
    if not names:
        raise ConfigError(f"{path}: its weight_map names no tensor")
    for tensor, file in names.items():
        parts = PurePosixPath(file)
        if not file or "\0" in file or "\\" in file or parts.is_absolute() or ".." in parts.parts:
            raise ConfigError(f"{path}: tensor {shown(tensor)} is placed outside the directory: {shown(file)}")
    return names


def _size(path: Path) -> int:
    try:
        status = path.stat()
    except FileNotFoundError:
        raise ConfigError(f"{path} is missing, though {path.parent / INDEX_FILE} names it") from None
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from None
    if not stat.S_ISREG(status.st_mode):
        raise ConfigError(f"{path} is not a regular file")
    return status.st_size


def _open_file(path: Path, copy: bool, progress: CopyProgress | None) -> _File:
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            length = header_length(file.read(64), size, str(path))
            file.seek(PREFIX_BYTES)
            entries = parse_header(file.read(length), size, str(path))
            if copy:
                return _File(path, entries, _copied(path, size, progress))
            if progress is not None:
                _warm(path, size, progress)
            return _File(path, entries, _mapped(path, file.fileno(), size))
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from None


def _mapped(path: Path, descriptor: int, size: int) -> NDArray[np.uint8]:
    flags, protection = mmap.MAP_PRIVATE | _NO_RESERVE, mmap.PROT_READ | mmap.PROT_WRITE
    try:
        memory = np.frombuffer(mmap.mmap(descriptor, size, flags=flags, prot=protection), np.uint8)
    except ValueError:  # shorter than the size that was just asked for
        raise ConfigError(f"{path} was cut off while it was opened") from None
    memory.flags.writeable = False
    return memory


def _copied(path: Path, size: int, progress: CopyProgress | None) -> NDArray[np.uint8]:
    memory = np.empty(size, np.uint8)
    chunks = (memory[start : start + _CHUNK_BYTES] for start in range(0, size, _CHUNK_BYTES))
    _read(path, chunks, size, progress)
    memory.flags.writeable = False
    return memory


def _warm(path: Path, size: int, progress: CopyProgress) -> None:
    scratch = np.empty(min(size, _CHUNK_BYTES), np.uint8)
    _read(path, (scratch[: size - start] for start in range(0, size, _CHUNK_BYTES)), size, progress)


def _read(path: Path, chunks: Iterable[NDArray[np.uint8]], size: int, progress: CopyProgress | None) -> None:
    """Read a file into one chunk after the other; raises ConfigError if it ends early."""
    done = 0
    with path.open("rb", buffering=0) as file:
        for chunk in chunks:
            filled = 0
            while filled < chunk.nbytes:
                count = file.readinto(chunk[filled:].data)
                if not count:
                    raise ConfigError(f"{path} was cut off while it was read")
                filled += count
            done += filled
            if progress is not None:
                progress(done, size)


def _shifted(progress: CopyProgress | None, before: int, total: int) -> CopyProgress | None:
    return None if progress is None else lambda done, _: progress(before + done, total)


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
