"""`--weight-source-config`: every key, no other, and values that are checked by name."""

from __future__ import annotations

from typing import Any

import pytest

from tensorhub_core.engine.config import WeightSourceConfig, check_mode, check_version, weight_source_config
from tensorhub_core.errors import ConfigError


def test_defaults_and_every_key() -> None:
    assert weight_source_config(None) == weight_source_config("") == weight_source_config("{}") == WeightSourceConfig()
    given = {
        "server": "tcp://10.0.0.1:7077",
        "model": "critic",
        "replica": "engine-1",
        "zone": "us",
        "host": "node-7",
        "rail": "mlx5_3",
        "spot": True,
        "version": 7,
        "follow": False,
        "bootstrap": True,
        "mode": "keep",
        "staged": True,
        "cast": True,
        "timeout_s": 5,
    }
    config = weight_source_config(given)
    assert config.as_dict() == given
    assert weight_source_config(config.as_dict()) == config


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ('{"sever": "tcp://x:1"}', ["sever", "server"]),
        ('{"mode": "drain"}', ["mode", "wait, keep, abort", "drain"]),
        ('{"version": -1}', ["version", "latest", "-1"]),
        ('{"version": true}', ["version", "True"]),
        ('{"follow": 1}', ["follow", "bool"]),
        ('{"timeout_s": 0}', ["timeout_s", "above 0"]),
        ('{"cast": "int8"}', ["cast", "bf16", "int8"]),
        ('{"cast": 1}', ["cast"]),
        ('{"model": ""}', ["model", "empty"]),
        ('{"model": null}', ["model"]),
        ("[1]", ["object", "list"]),
        ("{", ["JSON"]),
    ],
)
def test_what_is_wrong_is_named(given: str, words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        weight_source_config(given)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize(("value", "version"), [(0, 0), ("3", 3), ("latest", "latest")])
def test_versions(value: Any, version: Any) -> None:
    assert check_version(value) == version


@pytest.mark.parametrize("value", [-1, 1.5, None, "newest", "-3", False])
def test_impossible_versions(value: Any) -> None:
    with pytest.raises(ConfigError, match="version must be"):
        check_version(value)


def test_modes() -> None:
    assert [check_mode(mode) for mode in ("wait", "keep", "abort")] == ["wait", "keep", "abort"]
    with pytest.raises(ConfigError, match="mode must be one of"):
        check_mode("retract")
