"""Read `--weight-source-config`: the same keys for every engine, and no other."""

from __future__ import annotations

import dataclasses
import difflib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from tensorhub_core.errors import ConfigError
from tensorhub_core.layout.casting import check_cast

PauseMode = Literal["wait", "keep", "abort"]


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightSourceConfig:
    """How an engine takes part in a model's stream of versions.

    `server`: address of the reference server, several with commas between; None = `TENSORHUB_SERVER`, else this user's
    embedded server.
    `model`: name of the stream of versions. `replica`: name of this engine among the replicas; None = a unique one.
    `zone`, `host`, `rail`: datacentre, machine and NIC group of this engine; None = settings, else what is detected.
    `spot`: it may vanish at any time. `version`: what to start with, a number or "latest". `follow`: swap to newer
    versions by itself. `bootstrap`: with no version to be had, load from disk and publish version 0. `mode`: what a
    swap does with running requests. `staged`: transfer while the old version serves. `cast`: fill from a version in
    another floating dtype; a dtype's name: only into that one. `timeout_s`: seconds that a start or a swap may wait for
    weights; None = `call_timeout_s`.
    """

    server: str | None = None
    model: str = "policy"
    replica: str | None = None
    zone: str | None = None
    host: str | None = None
    rail: str | None = None
    spot: bool = False
    version: int | str = "latest"
    follow: bool = True
    bootstrap: bool = False
    mode: PauseMode = "wait"
    staged: bool = False
    cast: bool | str = False
    timeout_s: float | None = None

    def as_dict(self) -> dict[str, Any]:
        """Return the keys that differ from their defaults, as `weight_source_config` reads them."""
        return {
            field.name: value
            for field in dataclasses.fields(self)
            if (value := getattr(self, field.name)) != field.default
        }


_TYPES: dict[str, tuple[type, ...]] = {
    "server": (str,),
    "model": (str,),
    "replica": (str,),
    "zone": (str,),
    "host": (str,),
    "rail": (str,),
    "spot": (bool,),
    "version": (int, str),
    "follow": (bool,),
    "bootstrap": (bool,),
    "mode": (str,),
    "staged": (bool,),
    "cast": (bool, str),
    "timeout_s": (int, float),
}
_NULLABLE = ("server", "replica", "zone", "host", "rail", "timeout_s")


def weight_source_config(given: str | Mapping[str, Any] | None) -> WeightSourceConfig:
    """Read the config from JSON text or a mapping; raises ConfigError naming the key and what is allowed."""
    if isinstance(given, str):
        try:
            given = json.loads(given) if given.strip() else {}
        except json.JSONDecodeError as error:
            raise ConfigError(f"--weight-source-config is not JSON: {error}") from None
    if not isinstance(given, Mapping):
        if given is not None:
            raise ConfigError(f"--weight-source-config must be a JSON object, not {type(given).__name__}")
        given = {}
    for key, value in given.items():
        _check(key, value)
    return WeightSourceConfig(**given)


def check_version(value: object) -> int | Literal["latest"]:
    """Return a version as users name it, a number >= 0 or "latest"; raises ConfigError."""
    if isinstance(value, str) and value.isdecimal():
        value = int(value)
    if value == "latest":
        return "latest"
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return value
    raise ConfigError(f'version must be a whole number of at least 0 or "latest", not {value!r}')


def check_mode(value: object) -> PauseMode:
    """Return a pause mode; raises ConfigError naming the allowed ones."""
    for mode in get_args(PauseMode):
        if value == mode:
            return mode  # type: ignore[no-any-return]
    raise ConfigError(f"mode must be one of {', '.join(get_args(PauseMode))}, not {value!r}")


def _check(key: str, value: object) -> None:
    if key not in _TYPES:
        near = difflib.get_close_matches(key, _TYPES, n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise ConfigError(
            f"unknown key {key!r} in --weight-source-config.{hint} Valid keys: {', '.join(sorted(_TYPES))}"
        )
    if value is None and key in _NULLABLE:
        return
    kinds = _TYPES[key]
    if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
        raise ConfigError(f"{key} must be {' or '.join(kind.__name__ for kind in kinds)}, not {value!r}")
    if key == "version":
        check_version(value)
    elif key == "mode":
        check_mode(value)
    elif key == "cast":
        check_cast(value)
    elif key in ("model", "replica") and value == "":
        raise ConfigError(f"{key} must not be empty")
    elif key == "timeout_s" and isinstance(value, int | float) and not 0 < value < float("inf"):
        raise ConfigError(f"timeout_s must be a number of seconds above 0, not {value!r}")
