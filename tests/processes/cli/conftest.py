"""One hub for all tests of a module; every test uses a model of its own."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest

from tests.processes.cli.commands import HUB_OPTIONS, running

_models = itertools.count()


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Return the address of a real hub."""
    log = tmp_path_factory.mktemp("hub") / "log"
    with running("serve", "--bind", "tcp://127.0.0.1:0", *HUB_OPTIONS, log=log) as command:
        assert command.first_line.startswith("listening on tcp://127.0.0.1:")
        yield command.first_line.removeprefix("listening on ")


@pytest.fixture
def model() -> str:
    """Return the name of a model that no other test uses."""
    return f"model-{next(_models)}"
