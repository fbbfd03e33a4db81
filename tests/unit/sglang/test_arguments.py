"""What users write about the source of weights arrives in SGLang's own fields, whole and checked."""

from __future__ import annotations

import argparse
import json
from types import SimpleNamespace
from typing import Any

import pytest

from tensorhub_core.errors import ConfigError
from tensorhub_sglang import engine_args
from tensorhub_sglang.arguments import add_arguments, config_of, server_args_maker, with_our_fields

CONFIG = '{"server": "tcp://127.0.0.1:7077", "model": "actor", "follow": false}'


def parsed(*given: str) -> dict[str, Any]:
    """Parse a command line as SGLang does and return its fields as they reach ServerArgs."""
    parser = argparse.ArgumentParser(prog="sglang serve")
    parser.add_argument("--load-format", choices=["auto", "safetensors"], default="auto")
    parser.add_argument("--model-loader-extra-config", default="{}")
    add_arguments(parser)
    return with_our_fields(vars(parser.parse_args(given)))


def config_from(fields: dict[str, Any]) -> Any:
    """Return the config as a rank reads it."""
    return config_of(SimpleNamespace(**fields))


def test_an_engine_without_our_arguments_is_as_it_was() -> None:
    assert parsed() == {"load_format": "auto", "model_loader_extra_config": "{}"}
    assert config_from(parsed()) is None
    assert parsed("--weight-source", "disk", "--load-format", "safetensors")["load_format"] == "safetensors"


def test_the_config_reaches_every_process_whatever_the_order() -> None:
    for given in (
        ("--weight-source", "tensorhub", "--weight-source-config", CONFIG),
        ("--weight-source-config", CONFIG, "--weight-source", "tensorhub"),
    ):
        config = config_from(parsed(*given))
        assert (config.server, config.model, config.follow) == ("tcp://127.0.0.1:7077", "actor", False)


def test_defaults_need_no_config() -> None:
    config = config_from(parsed("--weight-source", "tensorhub"))
    assert (config.server, config.model, config.version, config.follow) == (None, "policy", "latest", True)


def test_other_loader_options_stay() -> None:
    extra = '{"enable_multithread_load": true}'
    for given in (
        ("--weight-source", "tensorhub", "--model-loader-extra-config", extra),
        ("--model-loader-extra-config", extra, "--weight-source", "tensorhub"),
    ):
        fields = parsed(*given)
        assert json.loads(fields["model_loader_extra_config"])["enable_multithread_load"] is True
        assert config_from(fields) is not None


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        (("--weight-source", "s3"), "invalid choice: 's3'"),
        (("--weight-source-config", '{"sever": "x"}'), "Did you mean 'server'?"),
        (("--weight-source-config", "{"), "not JSON"),
        (("--load-format", "safetensors", "--weight-source", "tensorhub"), "'safetensors' contradicts"),
    ],
)
def test_a_mistake_on_the_command_line_is_named(
    given: tuple[str, ...], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        parsed(*given)
    assert reason in capsys.readouterr().err


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"weight_source": "tensorhub", "load_format": "safetensors"}, "'safetensors' contradicts"),
        ({"weight_source": "hub"}, "must be one of disk, tensorhub, not 'hub'"),
        ({"weight_source_config": {"model": "actor"}}, "for weight_source 'tensorhub' only"),
        ({"weight_source": "tensorhub", "weight_source_config": {"modes": "wait"}}, "Did you mean 'mode'?"),
        ({"weight_source": "tensorhub", "model_loader_extra_config": "[1]"}, "must be a JSON object, not list"),
        ({"weight_source": "tensorhub", "model_loader_extra_config": "{"}, "is not JSON"),
    ],
)
def test_a_mistake_in_the_arguments_of_an_engine_is_named(fields: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason.replace("?", r"\?")):
        with_our_fields(fields)


def test_a_load_format_that_lost_its_config_is_refused() -> None:
    with pytest.raises(ConfigError, match="came without its config"):
        config_from({"load_format": "tensorhub", "model_loader_extra_config": "{}"})


@pytest.mark.parametrize(
    "given",
    [
        {"weight_source": "tensorhub", "weight_source_config": {"model": "actor"}},
        {"weight_source": "tensorhub", "weight_source_config": '{"model": "actor"}'},
        engine_args({"model": "actor"}),
    ],
)
def test_an_engine_is_made_with_sglangs_own_fields(given: dict[str, Any]) -> None:
    steps: list[str] = []

    def server_args(**fields: Any) -> Any:
        steps.append("made")
        return SimpleNamespace(**fields)

    make = server_args_maker(server_args, lambda: steps.append("hooked"))
    made = make(model_path="DIR", **given)
    assert vars(made).keys() == {"model_path", "load_format", "model_loader_extra_config"}
    assert config_of(made).model == "actor"  # type: ignore[union-attr]
    assert steps == ["hooked", "made"]


def test_an_engine_from_disk_is_not_touched() -> None:
    make = server_args_maker(SimpleNamespace, lambda: pytest.fail("hooked"))
    assert vars(make(model_path="DIR", load_format="auto")) == {"model_path": "DIR", "load_format": "auto"}
