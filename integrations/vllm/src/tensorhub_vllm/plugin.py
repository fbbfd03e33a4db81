"""vLLM's general plugin: adds `--weight-source`, the load format and the weight-transfer backend.

vLLM loads it in the API server, the engine core and every worker; calling it again in a process changes nothing.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from typing import Any

from tensorhub_core.engine.config import WeightSourceConfig, weight_source_config
from tensorhub_core.errors import ConfigError
from tensorhub_vllm import BACKEND, compat, engine_args


def register() -> None:
    """Register everything with vLLM."""
    from vllm.distributed.weight_transfer import WeightTransferEngineFactory
    from vllm.model_executor.model_loader import register_model_loader

    from tensorhub_vllm.loader import TensorHubLoader

    compat.add_cli_arguments(add_arguments)
    register_model_loader(BACKEND)(TensorHubLoader)
    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(BACKEND, "tensorhub_vllm.transfer", "TensorHubTransferEngine")
    compat.guard_native_rpcs(lambda engine: getattr(engine, "backend", None) == BACKEND)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add our arguments to a parser of engine arguments."""
    group = parser.add_argument_group("TensorHub")
    group.add_argument(
        "--weight-source",
        choices=["disk", BACKEND],
        default="disk",
        action=_WeightSource,
        help="Where the first weights come from. 'tensorhub': from peers that hold them; the model folder then needs "
        "only config and tokenizer, and newer versions are swapped in between requests.",
    )
    group.add_argument(
        "--weight-source-config",
        default=None,
        action=_WeightSourceConfig,
        help='JSON with any of the keys server, model ("policy"), replica, zone, spot, version ("latest"), follow '
        "(true), bootstrap (false), mode (wait | keep | abort), staged, cast, timeout_s.",
    )


class _WeightSource(argparse.Action):
    """Set vLLM's own fields: those that it does not know do not get past its command line."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> None:
        setattr(namespace, self.dest, values)
        if values == BACKEND:
            compat.allow_plugin(BACKEND)
            _set_fields(namespace, getattr(namespace, "weight_source_config", None) or WeightSourceConfig())


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
        if getattr(namespace, "weight_source", None) == BACKEND:
            _set_fields(namespace, config)


def _set_fields(namespace: argparse.Namespace, config: WeightSourceConfig) -> None:
    from vllm.config.weight_transfer import WeightTransferConfig

    fields = engine_args(config)
    namespace.load_format = fields["load_format"]
    namespace.worker_extension_cls = fields["worker_extension_cls"]
    namespace.weight_transfer_config = WeightTransferConfig(**fields["weight_transfer_config"])
    extra = dict(getattr(namespace, "model_loader_extra_config", None) or {})
    namespace.model_loader_extra_config = {**extra, **fields["model_loader_extra_config"]}
