"""What a figure shows: panels of lines or bars, or a tree; written as JSON, drawn by bench/figures.py."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

FOLDER = Path(__file__).resolve().parent.parent.parent / "docs" / "figures"


@dataclass(frozen=True)
class Series:
    """Values over the panel's x, one each."""

    name: str
    y: Sequence[float]


@dataclass(frozen=True)
class Panel:
    """One diagram. `x` are numbers for lines, names for bars."""

    kind: str
    title: str
    x_label: str
    y_label: str
    x: Sequence[float | str]
    series: Sequence[Series]
    log_x: bool = False
    log_y: bool = False


@dataclass(frozen=True)
class Edge:
    """A read: `name` got most of its bytes from `source`; `wan` if they are in different zones."""

    name: str
    source: str
    zone: str
    wan: bool


@dataclass(frozen=True)
class Figure:
    """One file. `note` is printed below."""

    name: str
    title: str
    note: str = ""
    panels: Sequence[Panel] = ()
    edges: Sequence[Edge] = ()
    assumptions: dict[str, object] = field(default_factory=dict)

    def write(self, folder: Path = FOLDER) -> Path:
        """Write the data."""
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{self.name}.json"
        path.write_text(json.dumps(asdict(self), indent=1) + "\n", encoding="utf-8")
        return path
