"""Read what a saved folder says of its model beside the tensors: few settings by name, and no object of any class.

`common.pt` is a pickle, with the trainer's arguments as an object of a class. It is not unpickled: its operations are
looked through for the names, each of which its value follows.
"""

from __future__ import annotations

import pickletools
import re
import zipfile
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from tensorhub_core.observe.log import get_logger

_COMMON, _BRIDGES = "common.pt", "run_config.yaml"
_MOST_BYTES = 256 << 20

Value = bool | int | None


def saved_settings(folder: Path, names: Collection[str]) -> dict[str, Value]:
    """Return those of some settings that Megatron or Megatron-Bridge wrote into the folder, the first of each name.

    What cannot be read is logged: the weights do not depend on it.
    """
    found: dict[str, Value] = {}
    for file, read in ((_COMMON, _of_pickle), (_BRIDGES, _of_yaml)):
        path = folder / file
        try:
            for name, value in read(path, frozenset(names)):
                found.setdefault(name, value)
        except FileNotFoundError:
            continue
        except Exception as error:  # a damaged file fails in as many ways as there are operations
            get_logger("megatron").warning("the settings in %s cannot be read, and are not compared: %s", path, error)
    return found


def _of_pickle(path: Path, names: frozenset[str]) -> Iterator[tuple[str, Value]]:
    with zipfile.ZipFile(path) as archive:
        (inside,) = (info for info in archive.infolist() if info.filename.endswith("/data.pkl"))
        if inside.file_size > _MOST_BYTES:
            raise ValueError(f"it describes its objects in {inside.file_size:,} bytes")
        data = archive.read(inside)
    noted: dict[int, str] = {}
    count = 0
    text = key = None
    argument: Any
    for operation, argument, _ in pickletools.genops(data):
        kind = operation.name
        if kind in ("PUT", "BINPUT", "LONG_BINPUT", "MEMOIZE"):
            number = count if kind == "MEMOIZE" else argument
            count += 1
            if text in names:
                noted[number] = text
            continue  # what was read before is still the last
        value = _value(kind, argument)
        if key is not None and value is not NotImplemented:
            yield key, value
        text = argument if kind.endswith("UNICODE") else noted.get(argument) if kind.endswith("GET") else None
        key = text if text in names else None


def _value(kind: str, argument: Any) -> Any:
    """Return a value that one operation makes, NotImplemented for all others."""
    if kind in ("NEWTRUE", "NEWFALSE"):
        return kind == "NEWTRUE"
    if kind == "NONE":
        return None
    return argument if kind in ("INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1") else NotImplemented


def _of_yaml(path: Path, names: frozenset[str]) -> Iterator[tuple[str, Value]]:
    with path.open(encoding="utf-8") as file:
        text = file.read(_MOST_BYTES)
    plain: Mapping[str, Value] = {"true": True, "false": False, "null": None}
    for name, value in re.findall(r"^\s*(\w+):\s+(true|false|null|\d+)\s*$", text, re.MULTILINE):
        if name in names:
            yield name, plain[value] if value in plain else int(value)
