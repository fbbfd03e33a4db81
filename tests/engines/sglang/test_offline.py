"""`sglang.Engine` without a server: the arguments of the command line as keyword arguments, swaps by hand."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from tensorhub_core import Server

from ..models import Checkpoints, training
from .server import FLOAT32, Servers
from .zygote import Forked

pytestmark = pytest.mark.timeout(300)
KIND = "tied-float32"


def result(process: Forked, path: Path) -> dict[str, Any]:
    """Return what the process wrote to a file, when it has."""
    until = time.monotonic() + 120
    while not path.exists():
        assert process.poll() is None, process.text()
        assert time.monotonic() < until, process.text()
        time.sleep(0.05)
    return dict(json.loads(path.read_text()))


def test_an_engine_starts_by_keyword_arguments_and_swaps_by_hand(
    servers: Servers, checkpoints: Checkpoints, hub: Server, folder: Path
) -> None:
    config = {"server": hub.address, "timeout_s": 60}
    arguments = {"weight_source": "tensorhub", "weight_source_config": config, "dtype": "float32"}
    bare = str(checkpoints.bare(KIND))
    with training(hub.address, checkpoints(KIND, 1)) as trainer:
        process = servers.call("tests.engines.sglang.offline", "start_and_swap", bare, arguments, str(folder))
        try:
            first = result(process, folder / "1")
            assert first["version"] == 1
            trainer.publish(checkpoints(KIND, 2), 2)
            (folder / "go").touch()
            second = result(process, folder / "2")
        finally:
            process.end()
    assert second["version"] == 2
    for version, found in ((1, first), (2, second)):
        assert found["answers"] == servers.fresh(checkpoints(KIND, version), *FLOAT32).answers
        assert set(found["weight_versions"]) == {str(version)}
