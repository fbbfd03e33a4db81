"""Fill the configuration records: file < environment < command line < argument.

The file is TOML with one `key = value` a line, at `TENSORHUB_CONFIG` or `tensorhub/config.toml` in the user's
configuration folder. An unknown key is an error everywhere, so that a typing mistake never passes for a default.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import os
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, get_args, get_type_hints

from tensorhub_core.config import ClientConfig, ServerConfig
from tensorhub_core.errors import ConfigError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

PREFIX = "TENSORHUB_"
FILE_VARIABLE = "TENSORHUB_CONFIG"
_KUBERNETES = re.compile(r"TENSORHUB_(\w+_)?(SERVICE_(HOST|PORT\w*)|PORT(_\d+_(TCP|UDP|SCTP)\w*)?)")
"""Variables that Kubernetes sets in every pod when a service is called `tensorhub...`: not ours."""


@dataclass(frozen=True, slots=True)
class Key:
    """One setting: where it lives and which values it may have."""

    name: str
    record: type[ClientConfig] | type[ServerConfig]
    kind: type
    optional: bool
    default: object
    doc: str
    least: float | None
    choices: tuple[str, ...]

    @property
    def variable(self) -> str:
        """Return the name of the environment variable."""
        return PREFIX + self.name.upper()


@dataclass(frozen=True, slots=True)
class Settings:
    """The filled records, and where each value that is not a default came from."""

    client: ClientConfig
    server: ServerConfig
    origins: Mapping[str, str]


def keys() -> dict[str, Key]:
    """Return all settings by name, in the records' order."""
    found: dict[str, Key] = {}
    for record in (ClientConfig, ServerConfig):
        hints = get_type_hints(record)
        for field in dataclasses.fields(record):
            kinds = [kind for kind in (get_args(hints[field.name]) or (hints[field.name],)) if kind is not type(None)]
            optional = type(None) in get_args(hints[field.name])
            doc, least, choices = (field.metadata[part] for part in ("doc", "least", "choices"))
            found[field.name] = Key(field.name, record, kinds[0], optional, field.default, doc, least, choices)
    return found


def load_settings(
    arguments: Mapping[str, object] | Settings | None = None,
    *,
    cli: Mapping[str, object] | None = None,
    environ: Mapping[str, str] | None = None,
    file: Path | None = None,
) -> Settings:
    """Fill all settings; a `Settings` as `arguments` is returned as it is.

    `arguments` and `cli` map keys to values, None = not given. `environ` defaults to the process's, `file` to the
    user's settings file, which need not exist unless it is named. Raises ConfigError, naming the setting, where the
    value came from and what is allowed.
    """
    if isinstance(arguments, Settings):
        return arguments
    environ = os.environ if environ is None else environ
    known = keys()
    values: dict[str, object] = {}
    origins: dict[str, str] = {}
    for name, raw, origin in _layers(arguments, cli, environ, file):
        key = known.get(name)
        if key is None:
            raise ConfigError(_unknown(name, origin, known))
        values[name] = _value(key, raw, origin)
        origins[name] = origin
    return Settings(
        client=ClientConfig(**_part(values, known, ClientConfig)),
        server=ServerConfig(**_part(values, known, ServerConfig)),
        origins=MappingProxyType(origins),
    )


def _layers(
    arguments: Mapping[str, object] | None,
    cli: Mapping[str, object] | None,
    environ: Mapping[str, str],
    file: Path | None,
) -> Iterator[tuple[str, object, str]]:
    """Yield (key, raw value, origin) of every given setting, the stronger ones later."""
    path = _file_path(environ, file)
    if path is not None:
        for name, raw in _read_file(path).items():
            yield name, raw, str(path)
    for variable, text in sorted(environ.items()):
        ours = variable.startswith(PREFIX) and variable != FILE_VARIABLE and not _KUBERNETES.fullmatch(variable)
        if ours and text != "":
            yield variable[len(PREFIX) :].lower(), text, f"environment variable {variable}"
    for name, raw in (cli or {}).items():
        if raw is not None:
            yield name, raw, f"option --{name.replace('_', '-')}"
    for name, raw in (arguments or {}).items():
        if raw is not None:
            yield name, raw, f"argument {name!r}"


def _file_path(environ: Mapping[str, str], file: Path | None) -> Path | None:
    named = file or (Path(environ[FILE_VARIABLE]) if environ.get(FILE_VARIABLE) else None)
    if named is not None:
        if not os.path.isfile(named):
            raise ConfigError(f"the settings file {named} does not exist: correct {FILE_VARIABLE} or create it")
        return named
    folder = environ.get("XDG_CONFIG_HOME") or (os.path.join(environ["HOME"], ".config") if "HOME" in environ else "")
    path = Path(folder) / "tensorhub" / "config.toml"
    return path if folder and os.path.isfile(path) else None


def _read_file(path: Path) -> dict[str, object]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"the settings file {path} cannot be read: {error}") from None


def _unknown(name: str, origin: str, known: Mapping[str, Key]) -> str:
    near = difflib.get_close_matches(name, known, n=1)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    return f"unknown setting {name!r} ({origin}).{hint} Valid settings: {', '.join(sorted(known))}"


def _value(key: Key, raw: object, origin: str) -> object:
    """Convert one raw value to the setting's type and check its range."""
    value = _converted(key, raw)
    if value is None or (key.choices and value not in key.choices):
        raise ConfigError(f"{key.name} must be {_allowed(key)}, not {raw!r} ({origin})")
    if key.least is not None and not (isinstance(value, int | float) and value >= key.least):
        raise ConfigError(f"{key.name} must be {_allowed(key)}, not {raw!r} ({origin})")
    return value


def _converted(key: Key, raw: object) -> object:
    """Return the value in the setting's type, or None if it is not one. Text is accepted for numbers."""
    if key.kind is str:
        return raw if isinstance(raw, str) else None
    if isinstance(raw, bool) or not isinstance(raw, int | float | str):
        return None
    try:
        number = float(raw)
        if not math.isfinite(number) or (key.kind is int and number != int(number)):
            return None
        return int(raw) if key.kind is int else number
    except (ValueError, OverflowError):
        return None


def _allowed(key: Key) -> str:
    if key.choices:
        return "one of " + ", ".join(key.choices)
    text = {str: "text", int: "a whole number", float: "a number"}[key.kind]
    if key.name.endswith("_s"):
        text += " of seconds"
    return text if key.least is None else f"{text} of at least {key.least:g}"


def _part(values: Mapping[str, object], known: Mapping[str, Key], record: type) -> dict[str, Any]:
    return {name: value for name, value in values.items() if known[name].record is record}
