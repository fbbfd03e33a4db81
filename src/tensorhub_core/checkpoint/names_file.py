"""Read a file of other names for the tensors of a checkpoint."""

from __future__ import annotations

from pathlib import Path

from tensorhub_core.checkpoint.files import read_small
from tensorhub_core.checkpoint.header import is_name, parse_json_object, shown
from tensorhub_core.errors import ConfigError

_MAX_BYTES = 64 << 20


def read_names(path: Path) -> dict[str, str | None]:
    """Return what a JSON object maps keys to: the name to serve, or None for null; raises ConfigError."""
    names = parse_json_object(read_small(path, _MAX_BYTES), str(path))
    for key, name in names.items():
        if name is not None and (not isinstance(name, str) or not is_name(name)):
            raise ConfigError(f"{path} maps {shown(key)} to {shown(name)}: the name of a tensor or null was expected")
    return names
