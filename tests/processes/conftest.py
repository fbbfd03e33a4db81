"""The longest files go first: with several workers, one that begins last would keep the others waiting."""

from __future__ import annotations

import pytest

LONGEST = ("test_lives.py", "test_cut_links.py", "test_faults.py", "test_conformance.py", "test_seed.py")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Sort by file; within a file the order stays."""
    ranks = {name: rank for rank, name in enumerate(LONGEST)}
    items.sort(key=lambda item: ranks.get(item.path.name, len(ranks)))
