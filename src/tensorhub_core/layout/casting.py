"""Say which dtypes a reader may convert: floating ones into each other, and only where that was asked for."""

from __future__ import annotations

from tensorhub_core.errors import ConfigError

CASTABLE = ("bfloat16", "float16", "float32", "float64")
_SHORT = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "fp64": "float64"}

Cast = bool | str
"""False: never. True: into whatever the reader has. A dtype's name: into that one only."""


def check_cast(value: object) -> Cast:
    """Return what was asked for, a dtype by torch's name without prefix; raises ConfigError naming what is allowed."""
    if isinstance(value, bool):
        return value
    name = _SHORT.get(value, value) if isinstance(value, str) else None
    if name not in CASTABLE:
        raise ConfigError(f"cast must be true, false or one of {', '.join((*_SHORT, *CASTABLE))}, not {value!r}")
    return name


def may_cast(cast: Cast, source: str, destination: str) -> bool:
    """Tell whether a tensor of dtype `source` may fill one of dtype `destination`, equal ones aside."""
    wanted = cast is True or cast == destination
    return wanted and source in CASTABLE and destination in CASTABLE
