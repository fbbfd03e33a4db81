"""Real megatron-core on the CPU: jobs of ranks that are shared by all tests with so many ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from .ranks import Ranks


@pytest.fixture(scope="session")
def ranks() -> Iterator[Callable[[int], Ranks]]:
    """Return the running job of a world size; one that failed is started again."""
    jobs: dict[int, Ranks] = {}

    def job(world: int) -> Ranks:
        if world not in jobs or jobs[world].is_closed:
            jobs[world] = Ranks(world)
        return jobs[world]

    yield job
    for each in jobs.values():
        each.close()
