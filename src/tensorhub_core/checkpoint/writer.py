"""Write tensors as a Hugging Face safetensors directory, wholly or not at all.

Everything goes to a hidden folder next to the target, which takes the target's name when all its bytes are on disk.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from tensorhub_core.checkpoint.header import build_header, is_name, known_dtype, shown
from tensorhub_core.checkpoint.reader import INDEX_FILE, SINGLE_FILE
from tensorhub_core.client.tensors import RawTensor
from tensorhub_core.errors import ConfigError

MAX_SHARD_BYTES = 5_000_000_000
"""Default size above which a checkpoint is split, as other tools write it."""

_WRITE_CHUNK_BYTES = 16 << 20

WriteProgress = Callable[[int, int], None]
"""Called with (done_bytes, total_bytes)."""


def check_target(directory: str | os.PathLike[str]) -> Path:
    """Return the absolute target; raises ConfigError unless it can be written: absent, or an empty directory."""
    try:
        return _checked_target(Path(directory).resolve())
    except OSError as error:
        raise ConfigError(f"cannot write {directory}: {error.strerror or error}") from None


def _checked_target(target: Path) -> Path:
    parent = next(folder for folder in target.parents if folder.exists())
    if not parent.is_dir():
        raise ConfigError(f"{target} cannot be made: {parent} is not a directory")
    if not os.access(parent, os.W_OK | os.X_OK):
        raise ConfigError(f"{target} cannot be made: {parent} is not writable")
    if target.exists() and not target.is_dir():
        raise ConfigError(f"{target} exists and is not a directory")
    if target.is_dir() and any(target.iterdir()):
        raise ConfigError(f"{target} is not empty: name a new directory, or empty this one")
    if os.path.ismount(target):
        raise ConfigError(f"{target} is where a file system is mounted, which cannot be replaced: name a folder in it")
    return target


def write_checkpoint(
    directory: str | os.PathLike[str],
    tensors: Iterable[RawTensor],
    *,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    progress: WriteProgress | None = None,
) -> tuple[Path, ...]:
    """Write `tensors` to `directory`, which must be absent or empty, and return the weight files.

    More than `max_shard_bytes` are split into files with an index. The directory appears with everything in it, or not
    at all; an existing checkpoint is never touched. Raises ConfigError if a tensor cannot be stored or the disk
    refuses. Blocks; any thread.
    """
    target = check_target(directory)
    shards = split_shards(tensors, max_shard_bytes)
    total = sum(tensor.buffer.nbytes for shard in shards for tensor in shard)
    partial = target.parent / f".{target.name}.{secrets.token_hex(4)}.partial"
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        partial.mkdir()
        names = _write_shards(partial, shards, total, progress)
        _sync_folder(partial)
        check_target(target)
        partial.rename(target)
        _sync_folder(target.parent)
    except OSError as error:
        raise ConfigError(f"cannot write {target}: {error.strerror or error}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return tuple(target / name for name in names)


def split_shards(tensors: Iterable[RawTensor], max_shard_bytes: int) -> list[list[RawTensor]]:
    """Split tensors, taken by name, into files of at most `max_shard_bytes`; a larger tensor gets a file of its own.

    Within a file the largest elements come first, so that every tensor is aligned. Raises ConfigError for repeated or
    impossible names and for dtypes that safetensors does not have.
    """
    if max_shard_bytes <= 0:
        raise ConfigError(f"max_shard_bytes must be positive, not {max_shard_bytes}")
    shards: list[list[RawTensor]] = [[]]
    size, last = 0, None
    for tensor in sorted(tensors, key=lambda tensor: tensor.name):
        if tensor.name == last or not is_name(tensor.name):
            raise ConfigError(f"tensor name {shown(tensor.name)} is repeated or cannot be stored")
        known_dtype(tensor.dtype, tensor.name)
        if shards[-1] and size + tensor.buffer.nbytes > max_shard_bytes:
            shards.append([])
            size = 0
        shards[-1].append(tensor)
        size += tensor.buffer.nbytes
        last = tensor.name
    for shard in shards:
        shard.sort(key=lambda tensor: (-known_dtype(tensor.dtype, tensor.name).order, tensor.name))
    return shards


def _write_shards(
    folder: Path, shards: Sequence[Sequence[RawTensor]], total: int, progress: WriteProgress | None
) -> list[str]:
    done = 0

    def report(count: int) -> None:
        nonlocal done
        done += count
        if progress is not None:
            progress(done, total)

    if len(shards) == 1:
        _write_file(folder / SINGLE_FILE, shards[0], report)
        return [SINGLE_FILE]
    names, places = [], {}
    for number, shard in enumerate(shards, start=1):
        names.append(f"model-{number:05d}-of-{len(shards):05d}.safetensors")
        _write_file(folder / names[-1], shard, report)
        places.update(dict.fromkeys((tensor.name for tensor in shard), names[-1]))
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(places.items()))}
    with (folder / INDEX_FILE).open("w", encoding="utf-8") as file:
        json.dump(index, file, ensure_ascii=False, indent=2)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())
    return names


def _write_file(path: Path, tensors: Sequence[RawTensor], report: Callable[[int], None]) -> None:
    header = build_header(
        [(tensor.name, tensor.dtype, tensor.shape, tensor.buffer.nbytes) for tensor in tensors], {"format": "pt"}
    )
    with path.open("wb") as file:
        file.write(header)
        for tensor in tensors:
            for start in range(0, tensor.buffer.nbytes, _WRITE_CHUNK_BYTES):
                chunk = tensor.buffer[start : start + _WRITE_CHUNK_BYTES]
                file.write(chunk.data)
                report(chunk.nbytes)
        file.flush()
        os.fsync(file.fileno())


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
