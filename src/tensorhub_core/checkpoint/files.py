"""Map the files of a checkpoint, or read them; every fault names the file.

The mapping is private and writable although nothing writes to it: network cards register memory for writing, which a
read-only mapping refuses. A file that changes on disk shows through; readers' checksums catch it. A file that is cut
off on disk ends the process that serves it, so replace files instead of rewriting them, or copy them.
"""

from __future__ import annotations

import mmap
import os
import stat
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

import numpy as np
from numpy.typing import NDArray

from tensorhub_core.client.tensors import RawTensor
from tensorhub_core.errors import ConfigError
from tensorhub_core.layout.types import Box

CHUNK_BYTES = 16 << 20
_NO_RESERVE: int = getattr(mmap, "MAP_NORESERVE", 0)

CopyProgress = Callable[[int, int], None]
"""Called with (done_bytes, total_bytes)."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A validated checkpoint: `tensors` are sorted by name, their buffers views of the mapped `files`.

    `boxes` say which regions of logical tensors lie in those that are not whole logical tensors themselves. `left_out`
    counts what the folder holds beside weights: items of optimizers, of loaders of data, numbers. The mappings live as
    long as a view of them.
    """

    directory: Path
    files: tuple[Path, ...]
    tensors: tuple[RawTensor, ...]
    total_bytes: int
    boxes: Mapping[str, tuple[Box, ...]] = field(default_factory=dict)
    left_out: int = 0


@dataclass(frozen=True, slots=True)
class Extent:
    """A run of bytes of a file."""

    path: Path
    offset_bytes: int
    length_bytes: int


def existing_folder(directory: str | os.PathLike[str]) -> Path:
    """Return the folder; raises ConfigError unless there is one that can be listed."""
    folder = Path(directory)
    try:
        with os.scandir(folder):
            return folder
    except FileNotFoundError:
        what = "does not exist"
    except NotADirectoryError:
        what = "is not a directory" if os.path.lexists(folder) else "does not exist"
    except (OSError, ValueError) as error:
        what = f"cannot be read: {getattr(error, 'strerror', error)}"
    raise ConfigError(f"checkpoint directory {folder} {what}")


def is_inside(file: str) -> bool:
    """Tell whether a relative path that a file names stays within its folder."""
    parts = PurePosixPath(file)
    return bool(file) and "\0" not in file and "\\" not in file and not parts.is_absolute() and ".." not in parts.parts


def file_size(path: Path, named_by: Path | None = None) -> int:
    """Return the size in bytes of a regular file, which another one may name; raises ConfigError."""
    try:
        status = path.stat()
    except FileNotFoundError:
        raise ConfigError(f"{path} is missing" + (f", though {named_by} names it" if named_by else "")) from None
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from None
    if not stat.S_ISREG(status.st_mode):
        raise ConfigError(f"{path} is not a regular file")
    return status.st_size


def read_small(path: Path, most_bytes: int) -> bytes:
    """Return the contents of a file of at most `most_bytes`; raises ConfigError."""
    size = file_size(path)
    if size > most_bytes:
        raise ConfigError(f"{path} is larger than any such file: {size:,} bytes")
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from None


def map_file(path: Path, descriptor: int, size: int) -> NDArray[np.uint8]:
    """Map an open file of `size` bytes, u8 [size]; raises ConfigError if it is shorter by now."""
    if size == 0:
        return np.empty(0, np.uint8)
    flags, protection = mmap.MAP_PRIVATE | _NO_RESERVE, mmap.PROT_READ | mmap.PROT_WRITE
    try:
        memory = np.frombuffer(mmap.mmap(descriptor, size, flags=flags, prot=protection), np.uint8)
    except ValueError:  # shorter than the size that was just asked for
        raise ConfigError(f"{path} was cut off while it was opened") from None
    memory.flags.writeable = False
    return memory


def copied(extent: Extent, progress: CopyProgress | None) -> NDArray[np.uint8]:
    """Read a run of bytes into memory of the process, u8 [length_bytes]; raises ConfigError."""
    try:
        memory = np.empty(extent.length_bytes, np.uint8)
    except MemoryError:
        raise ConfigError(f"no memory for {extent.length_bytes:,} bytes of {extent.path}: serve it mapped") from None
    starts = range(0, extent.length_bytes, CHUNK_BYTES)
    _read(extent, (memory[start : start + CHUNK_BYTES] for start in starts), progress)
    memory.flags.writeable = False
    return memory


def warm(extent: Extent, progress: CopyProgress) -> None:
    """Read a run of bytes once, so that it is in the system's memory when it is needed."""
    size = extent.length_bytes
    scratch = np.empty(min(size, CHUNK_BYTES), np.uint8)
    _read(extent, (scratch[: size - start] for start in range(0, size, CHUNK_BYTES)), progress)


def _read(extent: Extent, chunks: Iterable[NDArray[np.uint8]], progress: CopyProgress | None) -> None:
    """Read into one chunk after the other; raises ConfigError if the file ends early."""
    done = 0
    with extent.path.open("rb", buffering=0) as file:
        file.seek(extent.offset_bytes)
        for chunk in chunks:
            filled = 0
            while filled < chunk.nbytes:
                count = file.readinto(chunk[filled:].data)
                if not count:
                    raise ConfigError(f"{extent.path} was cut off while it was read")
                filled += count
            done += filled
            if progress is not None:
                progress(done, extent.length_bytes)


def shifted(progress: CopyProgress | None, before: int, total: int) -> CopyProgress | None:
    """Return the progress of a part, as `progress` hears of the whole."""
    return None if progress is None else lambda done, _: progress(before + done, total)
