"""What tests of the executor share."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import pytest


class Closes(Protocol):
    def close(self) -> None: ...


class HasExecutor(Protocol):
    @property
    def executor(self) -> Closes: ...


@pytest.fixture
def worlds() -> Iterator[list[HasExecutor]]:
    """Close the executors of all worlds that a test has put in."""
    opened: list[HasExecutor] = []
    yield opened
    for world in opened:
        world.executor.close()
