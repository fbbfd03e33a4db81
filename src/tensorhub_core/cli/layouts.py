"""Find the layouts that a command is given: saved ones, those of checkpoint folders, and those of live replicas."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tensorhub_core.checkpoint.files import read_small
from tensorhub_core.checkpoint.formats import OpenOptions, open_folder
from tensorhub_core.cli.common import existing_server
from tensorhub_core.cli.status import fetch
from tensorhub_core.client.memory import RegisteredMemory
from tensorhub_core.client.observer import observe
from tensorhub_core.errors import ConfigError, LayoutMismatch, TensorHubError, VersionUnavailable
from tensorhub_core.layout.canonical import MAX_LAYOUT_BYTES, decode_layout, encode_layout
from tensorhub_core.layout.types import Layout
from tensorhub_core.settings import Settings
from tensorhub_core.wire.curve import client_keys

SUFFIX = ".layout"
_MOST_NAMED = 8
HELP = (
    "LAYOUT is a saved layout file (several with commas between, or a folder of them), a checkpoint folder, or "
    "MODEL[@VERSION]:REPLICA of a live hub."
)


@dataclass(frozen=True, slots=True)
class Named:
    """The layouts of all shards that a text on the command line stands for, by shard."""

    text: str
    layouts: tuple[Layout, ...]


@dataclass(frozen=True, slots=True)
class LiveName:
    """A replica of a live hub; `version` None = the one that it holds."""

    model: str
    replica: str
    version: int | None


def find_layouts(
    text: str,
    settings: Settings,
    server: str | None = None,
    options: OpenOptions | None = None,
    format: str | None = None,
) -> Named:
    """Return the layouts that a text stands for; what exists as a file or folder is one.

    `options` and `format` say how a checkpoint folder is opened. Raises ConfigError naming what was looked for,
    LayoutMismatch if a file holds no layout, VersionUnavailable if the replica holds no whole version.
    """
    layouts: list[Layout] = []
    for part in [text] if os.path.exists(text) else text.split(","):
        path = Path(part)
        if os.path.isdir(path):
            layouts += _of_folder(path, settings, options, format)
        elif os.path.isfile(path):
            layouts.append(load_layout(path))
        else:
            live = live_name(part)
            if live is None:
                hint = _hint(part, server)
                raise ConfigError(
                    f"there is no file or folder {part}, and it is no MODEL:REPLICA of a hub either{hint}"
                )
            layouts += _of_replica(live, server)
    return Named(text, tuple(sorted(layouts, key=lambda layout: layout.shard)))


def live_name(text: str) -> LiveName | None:
    """Read MODEL[@VERSION]:REPLICA; None if it is not that."""
    model, colon, replica = text.partition(":")
    name, at, number = model.rpartition("@")
    version = None
    if at and number.isascii() and number.isdigit():
        model, version = name, int(number)
    return LiveName(model, replica, version) if colon and model and replica else None


def save_layouts(layouts: Sequence[Layout], out: Path) -> list[Path]:
    """Write one layout to the file `out`, several to a folder of that name; returns the files."""
    if len(layouts) == 1:
        files = [out]
    else:
        if os.path.isfile(out):
            raise ConfigError(f"{out} is a file: {len(layouts)} layouts are written to a folder")
        files = [out / f"shard-{each.shard:05}-of-{each.num_shards:05}{SUFFIX}" for each in layouts]
    try:
        if len(files) > 1:
            out.mkdir(parents=True, exist_ok=True)
        for file, layout in zip(files, layouts, strict=True):
            file.write_bytes(encode_layout(layout))
    except OSError as error:
        raise ConfigError(f"cannot write {error.filename}: {error.strerror}") from None
    return files


def load_layout(path: Path) -> Layout:
    """Read a saved layout, checked like one from a stranger; raises LayoutMismatch naming the file."""
    try:
        return decode_layout(read_small(path, MAX_LAYOUT_BYTES))
    except LayoutMismatch as error:
        raise LayoutMismatch(
            f"{path} holds no layout ({error}); `tensorhub layout LAYOUT --out FILE` saves one"
        ) from None


def _of_folder(folder: Path, settings: Settings, options: OpenOptions | None, format: str | None) -> list[Layout]:
    saved = sorted(folder.glob(f"*{SUFFIX}"))
    if saved and format is None:
        return [load_layout(path) for path in saved]
    checkpoint = open_folder(folder, options, format)
    tensors = ((tensor.name, tensor) for tensor in checkpoint.tensors)
    return [RegisteredMemory(tensors, checkpoint.boxes, segment_bytes=settings.client.segment_bytes).layout]


def _hint(text: str, server: str | None) -> str:
    """Return which replicas a model has of which only the name was given; empty where nobody knows it."""
    named = live_name(f"{text.removesuffix(':')}:?")
    if named is None:
        return ""
    try:
        address, settings = existing_server(server)
        (model,) = fetch(address, named.model, settings.client.connect_timeout_s, client_keys(settings.client)).models
    except TensorHubError:
        return ""
    names = [f"{text.removesuffix(':')}:{row.replica}" for row in sorted(model.replicas, key=lambda row: row.replica)]
    if not names:
        return f"; model {named.model} has no replica just now"
    return f"; name one of its replicas, {', '.join(names[:_MOST_NAMED])}{' ...' if names[_MOST_NAMED:] else ''}"


def _of_replica(live: LiveName, server: str | None) -> list[Layout]:
    """Return the layouts of a replica's shards from the hub."""
    address, settings = existing_server(server)
    version = live.version
    if version is None:
        (model,) = fetch(address, live.model, settings.client.connect_timeout_s, client_keys(settings.client)).models
        shown = next((row for row in model.replicas if row.replica == live.replica), None)
        if shown is None:
            names = ", ".join(sorted(row.replica for row in model.replicas)) or "none"
            raise ConfigError(f"{live.model} has no replica {live.replica!r}; there are: {names}")
        version = shown.version
        if version is None:
            raise VersionUnavailable(
                f"{live.replica} holds no version of {live.model} just now, and a replica's layout is known by what it "
                "holds: try again while it does, or name a version"
            )
    with observe(address, model=live.model, settings=settings) as observer:
        found, held = observer.holders(version, settings.client.connect_timeout_s)
    layouts = [row.layout for row in held if row.replica == live.replica]
    if not layouts:
        holders = ", ".join(sorted({row.replica for row in held}))
        raise VersionUnavailable(f"{live.replica} does not hold version {int(found)} of {live.model}; {holders} do")
    return layouts
