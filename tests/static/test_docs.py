"""The pages agree with the code: links lead somewhere, commands exist, no error is left out."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path

import pytest

from tensorhub_core.engine.config import WeightSourceConfig
from tensorhub_core.errors import ERRORS, TensorHubError
from tests.static.sources import ROOT

PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_and_paths_lead_somewhere(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    links = [link.split("#")[0] for link in re.findall(r"\]\(([^)\s]+)\)", text) if "://" not in link]
    missing = [link for link in links if link and not (page.parent / link).exists()]
    files = re.findall(r"`((?:src|tests|tools|docs|bench|demo|integrations)/[\w./-]+)`", text)
    missing += [name for name in files if not (ROOT / name).exists()]
    assert missing == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_make_targets_exist(page: Path) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    named = set(re.findall(r"\bmake ([a-z]+(?:-[a-z]+)*)\b(?=`|$|[ ;]*#)", page.read_text("utf-8"), re.MULTILINE))
    assert named - targets == set()


def test_operations_names_every_error() -> None:
    text = (ROOT / "docs" / "operations.md").read_text(encoding="utf-8")
    errors = {kind.__name__ for kind in ERRORS.values()} - {TensorHubError.__name__}
    assert {name for name in errors if f"| `{name}` |" not in text} == set()


def test_engines_names_every_key_of_the_config_and_its_default() -> None:
    text = (ROOT / "docs" / "engines.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| ((?:`\w+`(?:, )?)+) \| ([^|]*) \|", text, re.MULTILINE)
    keys = {name: default for names, default in reversed(rows) for name in re.findall(r"`(\w+)`", names)}
    fields = dataclasses.fields(WeightSourceConfig)
    assert {field.name for field in fields} <= keys.keys()
    told = {field.name: json.dumps(field.default) for field in fields if field.default is not None}
    assert {name for name, default in told.items() if default not in keys[name]} == set()


def test_laws_names_every_law_once() -> None:
    text = (ROOT / "docs" / "laws.md").read_text(encoding="utf-8")
    assert re.findall(r"^\*\*L(\d+) ", text, re.MULTILINE) == [str(number) for number in range(1, 15)]


def test_decisions_are_numbered_without_gaps() -> None:
    names = sorted(path.name for path in (ROOT / "docs" / "decisions").glob("*.md") if path.name != "README.md")
    assert [name[:4] for name in names] == [f"{number:04d}" for number in range(1, len(names) + 1)]
    for name in names:
        title = (ROOT / "docs" / "decisions" / name).read_text(encoding="utf-8").splitlines()[0]
        assert re.match(rf"# {int(name[:4])}\. \S", title), name
