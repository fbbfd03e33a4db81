"""Tell what kind of checkpoint a folder holds, and open it.

Kinds that name their tensors as a trainer does are opened by its integration, which is found through the entry points
`tensorhub.checkpoints` of the installed packages.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, Protocol

from tensorhub_core.checkpoint.dcp import open_dcp
from tensorhub_core.checkpoint.dcp_index import INDEX_FILE as DCP_INDEX_FILE
from tensorhub_core.checkpoint.files import Checkpoint, CopyProgress, existing_folder, read_small
from tensorhub_core.checkpoint.header import parse_json_object, shown
from tensorhub_core.checkpoint.reader import INDEX_FILE, SINGLE_FILE, open_checkpoint
from tensorhub_core.errors import ConfigError

SAFETENSORS, DCP, TORCH_DIST = "safetensors", "dcp", "torch_dist"
FORMATS = (SAFETENSORS, DCP, TORCH_DIST)
ENTRY_POINTS = "tensorhub.checkpoints"

_MEGATRON_FILE = "metadata.json"
_LATEST_FILE = "latest_checkpointed_iteration.txt"
_PACKAGES = {TORCH_DIST: "tensorhub-megatron"}
_MAX_HINTS = 5


@dataclass(frozen=True, slots=True)
class OpenOptions:
    """How to open a folder.

    `prefix` and `names` choose and rename tensors as `open_dcp` says. `hf_config`, a folder or `config.json`, describes
    the model to formats that do not name tensors as Hugging Face does. `copy` reads the files into memory; `progress`
    hears of the reading.
    """

    prefix: str | None = None
    names: Mapping[str, str | None] | None = None
    hf_config: Any = None
    copy: bool = False
    progress: CopyProgress | None = None


class Opener(Protocol):
    """What an entry point of `tensorhub.checkpoints` is; its name is the format's."""

    def __call__(self, folder: Path, options: OpenOptions) -> Checkpoint:
        """Open the folder; raises ConfigError."""


def open_folder(
    directory: str | os.PathLike[str], options: OpenOptions | None = None, format: str | None = None
) -> Checkpoint:
    """Open whatever checkpoint a folder holds, as `format` or as what it looks like.

    Raises ConfigError if it looks like none or several, lacks something, or needs a package that is not installed.
    """
    options = options or OpenOptions()
    if format is None:
        folder, format = detect(directory)
    else:
        folder = existing_folder(directory)
    if format == SAFETENSORS:
        _refuse(options, format, "prefix", "names", "hf_config")
        return open_checkpoint(folder, copy=options.copy, progress=options.progress)
    if format == DCP:
        _refuse(options, format, "hf_config")
        return open_dcp(
            folder, prefix=options.prefix, names=options.names, copy=options.copy, progress=options.progress
        )
    return _installed(format, folder)(folder, options)


def detect(directory: str | os.PathLike[str]) -> tuple[Path, str]:
    """Return the folder that holds the checkpoint, and its format; a folder of iterations stands for the newest one.

    Raises ConfigError saying what was looked for if there is none, or more than one.
    """
    folder = existing_folder(directory)
    found = _formats_in(folder)
    if not found and os.path.isfile(folder / _LATEST_FILE):
        folder = _newest_iteration(folder)
        found = _formats_in(folder)
    if len(found) == 1:
        return folder, found[0]
    if found:
        raise ConfigError(f"{folder} holds checkpoints of several formats: say which: {' or '.join(found)}")
    raise ConfigError(f"{folder} holds no checkpoint: {_missing(folder)}")


def _formats_in(folder: Path) -> list[str]:
    found = []
    if any(folder.glob("*.safetensors")) or os.path.exists(folder / INDEX_FILE):
        found.append(SAFETENSORS)
    if os.path.isfile(folder / _MEGATRON_FILE) and _backend(folder) is not None:
        found.append(TORCH_DIST)
        if not os.path.exists(folder / DCP_INDEX_FILE):
            raise ConfigError(f"{folder} was not saved to its end: it has {_MEGATRON_FILE} but no {DCP_INDEX_FILE}")
    elif os.path.isfile(folder / DCP_INDEX_FILE):
        found.append(DCP)
    return found


def _backend(folder: Path) -> str | None:
    """Return the way in which Megatron saved its tensors, None if the folder is not Megatron's."""
    path = folder / _MEGATRON_FILE
    backend = parse_json_object(read_small(path, 1 << 20), str(path)).get("sharded_backend")
    if backend is None or backend == TORCH_DIST:
        return backend
    raise ConfigError(
        f"{folder} was saved by Megatron as {shown(backend)}: only {TORCH_DIST} can be served; convert it"
    )


def _newest_iteration(folder: Path) -> Path:
    path = folder / _LATEST_FILE
    newest = read_small(path, 1 << 10).decode(errors="replace").strip()
    if newest != "release" and not (newest.isascii() and newest.isdigit()):
        raise ConfigError(f"{path} does not hold the number of an iteration: {shown(newest)}")
    return existing_folder(folder / (newest if newest == "release" else f"iter_{int(newest):07d}"))


def _missing(folder: Path) -> str:
    if any(folder.glob("*.distcp")):
        return f"it has *.distcp files but no {DCP_INDEX_FILE}, which is written last, so it was not saved to its end"
    if any(folder.glob("*.bin")) or any(folder.glob("*.pt")):
        return "only pickled files (*.bin, *.pt), which may hold anything and are not read; save it as safetensors"
    looked = f"no {SINGLE_FILE}, {INDEX_FILE} or single *.safetensors file, no {DCP_INDEX_FILE}, no {_LATEST_FILE}"
    inner = []
    for child in sorted(os.listdir(folder)):
        if any(os.path.exists(folder / child / name) for name in (SINGLE_FILE, INDEX_FILE, DCP_INDEX_FILE)):
            inner.append(child)
    hint = f"; there are checkpoints in {', '.join(inner[:_MAX_HINTS])} below it" if inner else ""
    return f"it has {looked}{hint}"


def _refuse(options: OpenOptions, format: str, *names: str) -> None:
    given = [name for name in names if getattr(options, name) is not None]
    if given:
        raise ConfigError(f"a folder of {format} takes no {' and no '.join(given)}: it names its tensors itself")


def _installed(format: str, folder: Path) -> Opener:
    for point in entry_points(group=ENTRY_POINTS):
        if point.name == format:
            opener: Opener = point.load()
            return opener
    package = _PACKAGES.get(format)
    if package is None:
        raise ConfigError(f"{format!r} is no known format of checkpoints: {', '.join(FORMATS)}")
    raise ConfigError(f"{folder} is a {format} folder of Megatron's: install {package} to serve it")
