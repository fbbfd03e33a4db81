"""`--weight-source` and `--weight-source-config`, on SGLang's command line and as arguments of `sglang.Engine`.

Both end in two of SGLang's own fields, `load_format` and `model_loader_extra_config`: those reach every process of an
engine, and a process without this adapter refuses the format instead of loading something else.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tensorhub_core.engine.config import WeightSourceConfig, weight_source_config
from tensorhub_core.errors import ConfigError
from tensorhub_sglang import BACKEND, CONFIG_KEY, engine_args

SOURCE, CONFIG = "weight_source", "weight_source_config"
SOURCES = ("disk", BACKEND)
_AUTO = "auto"

Fields = dict[str, Any]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add our arguments to SGLang's parser."""
    group = parser.add_argument_group("TensorHub")
    group.add_argument(
        "--weight-source",
        choices=SOURCES,
        default="disk",
        action=_WeightSource,
        help="Where the first weights come from. 'tensorhub': from peers that hold them; the model folder then needs "
        "only config and tokenizer, and newer versions are swapped in while the engine serves.",
    )
    group.add_argument(
        "--weight-source-config",
        default=None,
        action=_WeightSourceConfig,
        help='JSON with any of the keys server, model ("policy"), replica, zone, spot, version ("latest"), follow '
        "(true), bootstrap (false), mode (wait | keep | abort), staged, cast, timeout_s.",
    )


class _WeightSource(argparse.Action):
    """Set SGLang's field at once: should nothing else of the adapter work, its loader refuses to start."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> None:
        setattr(namespace, self.dest, values)
        if values == BACKEND:
            if getattr(namespace, "load_format", _AUTO) not in (None, _AUTO, BACKEND):
                parser.error(_contradiction(namespace.load_format))
            namespace.load_format = BACKEND
        elif getattr(namespace, "load_format", _AUTO) == BACKEND:
            namespace.load_format = _AUTO


class _WeightSourceConfig(argparse.Action):
    """Check the config where it is given, so that a typing mistake is seen at once."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> None:
        try:
            config = weight_source_config(values if isinstance(values, str) else json.dumps(values))
        except ConfigError as error:
            parser.error(str(error))
        setattr(namespace, self.dest, config)


def with_our_fields(given: Mapping[str, Any]) -> Fields:
    """Return SGLang's arguments without ours, and with what ours stand for.

    The same for those of a command line and of `sglang.Engine`. Raises ConfigError for contradictions and unknown keys.
    """
    fields = {name: value for name, value in given.items() if name not in (SOURCE, CONFIG)}
    source, config = given.get(SOURCE) or "disk", given.get(CONFIG)
    if source not in SOURCES:
        raise ConfigError(f"weight_source must be one of {', '.join(SOURCES)}, not {source!r}")
    if source == "disk":
        if config is not None:
            raise ConfigError(f"weight_source_config is for weight_source {BACKEND!r} only")
        return fields
    if fields.get("load_format") not in (None, _AUTO, BACKEND):
        raise ConfigError(_contradiction(fields["load_format"]))
    ours = engine_args(config)
    extra = {**_extra(fields.get("model_loader_extra_config")), **_extra(ours["model_loader_extra_config"])}
    return {**fields, **ours, "model_loader_extra_config": json.dumps(extra)}


def config_of(server_args: Any) -> WeightSourceConfig | None:
    """Return the config that SGLang's arguments carry, or None for weights from elsewhere; raises ConfigError."""
    if server_args.load_format != BACKEND:
        return None
    return config_in(_extra(server_args.model_loader_extra_config))


def config_in(extra: Mapping[str, Any]) -> WeightSourceConfig:
    """Return the config that is in `model_loader_extra_config`; raises ConfigError if there is none."""
    if CONFIG_KEY not in extra:
        raise ConfigError(f"load_format {BACKEND!r} came without its config: start with --weight-source {BACKEND}")
    return weight_source_config(extra[CONFIG_KEY])


def server_args_maker(original: Callable[..., Any], wanted: Callable[[], None]) -> Callable[..., Any]:
    """Return what `sglang.Engine` makes its ServerArgs with, given SGLang's own way.

    `wanted` is called first if the weights are to come from a hub.
    """

    def make(**given: Any) -> Any:
        fields = with_our_fields(given)
        if fields.get("load_format") == BACKEND:
            wanted()
        return original(**fields)

    return make


def _extra(given: str | Mapping[str, Any] | None) -> dict[str, Any]:
    try:
        extra = json.loads(given or "{}") if isinstance(given, str) else given or {}
    except json.JSONDecodeError as error:
        raise ConfigError(f"model_loader_extra_config is not JSON: {error}") from None
    if not isinstance(extra, Mapping):
        raise ConfigError(f"model_loader_extra_config must be a JSON object, not {type(extra).__name__}")
    return dict(extra)


def _contradiction(load_format: object) -> str:
    return f"load_format {load_format!r} contradicts weight_source {BACKEND!r}: leave it out"
