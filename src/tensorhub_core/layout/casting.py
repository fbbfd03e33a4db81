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


NOT_AGAIN: Cast = ""
"""What a reader that converts may do with numbers that were converted before: nothing, or rounding twice would give
others other bits."""


def hint(cast: Cast) -> str:
    """Return what a reader can do whose `cast` does not let it convert dtypes that can be converted."""
    if cast == NOT_AGAIN:
        return "the version is held by readers that have converted it, and no number is converted twice"
    return f"cast={cast!r} converts into that one only" if cast else "connect() with cast=True would convert dtypes"


def may_cast(cast: Cast, source: str, destination: str) -> bool:
    """Tell whether a tensor of dtype `source` may fill one of dtype `destination`, equal ones aside."""
    wanted = cast is True or cast == destination
    return wanted and source in CASTABLE and destination in CASTABLE
