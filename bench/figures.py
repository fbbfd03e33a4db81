"""Draw the figures of docs/figures from the data beside them.

    python -m bench.figures [NAME ...]

A figure's JSON (written by `python -m bench.sim`) has panels of lines or bars, or the edges of a tree.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.ticker import FuncFormatter, NullFormatter

FOLDER = Path(__file__).resolve().parent.parent / "docs" / "figures"
_COLOURS = ("#4c6a92", "#d98032", "#5a9a62", "#b0504d", "#8a6fae", "#777777")
_DPI = 120


def _short(value: float) -> str:
    """Write a figure in three digits."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


_plain = FuncFormatter(lambda value, _: f"{value:,g}")


def draw(path: Path) -> Path:
    """Draw the figure whose data is at `path`; returns where the picture is."""
    data: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    panels = data["panels"]
    rows, columns = (len(panels) + 1) // 2 or 1, min(2, len(panels)) or 1
    size = (6.8 * columns if panels else 10.0, 5.0 * rows)
    figure, axes = plt.subplots(rows, columns, figsize=size, squeeze=False)
    figure.suptitle(data["title"], fontsize=13)
    for axis, panel in zip(axes.flat, panels, strict=False):
        (_bars if panel["kind"] == "bars" else _lines)(axis, panel)
    if data["edges"]:
        _tree(axes[0][0], data["edges"])
    if data["note"]:
        figure.text(0.5, 0.01, data["note"], ha="center", fontsize=9, color="#555555")
    figure.tight_layout(rect=(0, 0.03, 1, 1))
    picture = path.with_suffix(".png")
    # Nothing of the day or of the program goes into the file: the same data gives the same picture.
    figure.savefig(picture, dpi=_DPI, metadata={"Software": None})
    plt.close(figure)
    return picture


def _lines(axis: Any, panel: dict[str, Any]) -> None:
    for number, series in enumerate(panel["series"]):
        bound = "bound" in series["name"] and "/" not in series["name"]
        style = "--" if bound else "-"
        colour = "#222222" if bound else _COLOURS[number % len(_COLOURS)]
        width = 3.0 - 0.5 * number  # lines that lie on each other are all seen
        name, x, y = series["name"], panel["x"], series["y"]
        axis.plot(x, y, style, marker="o", markersize=4, lw=width, color=colour, label=name)
    _label(axis, panel)
    if panel["log_x"]:
        axis.set_xscale("log", base=2)
        axis.xaxis.set_major_formatter(_plain)


def _bars(axis: Any, panel: dict[str, Any]) -> None:
    series = panel["series"]
    width = 0.8 / len(series)
    for number, each in enumerate(series):
        places = [index + (number - (len(series) - 1) / 2) * width for index in range(len(panel["x"]))]
        bars = axis.bar(places, each["y"], width, color=_COLOURS[number % len(_COLOURS)], label=each["name"])
        axis.bar_label(bars, fmt=_short, fontsize=6, padding=1)
    names = [_wrapped(str(name)) for name in panel["x"]]
    axis.set_xticks(range(len(names)), names, fontsize=8)
    _label(axis, panel)


def _label(axis: Any, panel: dict[str, Any]) -> None:
    axis.set_title(_wrapped(panel["title"], 60), fontsize=10)
    axis.set_xlabel(panel["x_label"])
    axis.set_ylabel(panel["y_label"])
    if panel["log_y"]:
        axis.set_yscale("log")
        low, high = axis.get_ylim()
        axis.set_ylim(low, high * (high / low) ** 0.05)
        axis.yaxis.set_major_formatter(_plain)
        axis.yaxis.set_minor_formatter(_plain if high / low < 30 else NullFormatter())
    axis.grid(True, axis="y", alpha=0.3)
    if len(panel["series"]) > 1:
        axis.legend(fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=2, frameon=False)


def _wrapped(text: str, most: int = 18) -> str:
    lines: list[str] = [""]
    for word in text.split():
        if lines[-1] and len(lines[-1]) + len(word) >= most:
            lines.append("")
        lines[-1] = f"{lines[-1]} {word}".strip()
    return "\n".join(lines)


def _tree(axis: Any, edges: list[dict[str, Any]]) -> None:
    """Draw who reads first from whom, level by level; readers of other sources too have thin lines to these."""
    first: dict[str, dict[str, Any]] = {}
    for edge in edges:
        first.setdefault(edge["name"], edge)
    children: dict[str, list[str]] = {}
    for name, edge in first.items():
        children.setdefault(edge["source"], []).append(name)
    roots = [name for name in children if name not in first]
    places: dict[str, tuple[float, float]] = {}
    row = [0.0]

    def put(name: str, depth: int) -> float:
        below = [put(child, depth + 1) for child in children.get(name, ())]
        if not below:
            row[0] += 1
        y = sum(below) / len(below) if below else row[0]
        places[name] = (float(depth), -y)
        return y

    for root in roots:
        put(root, 0)
    for edge in edges:
        (x0, y0), (x1, y1) = places[edge["source"]], places[edge["name"]]
        main = first[edge["name"]] is edge
        style, colour = ("--", "#b0504d") if edge["wan"] else ("-", "#4c6a92")
        axis.plot([x0, x1], [y0, y1], style, color=colour, lw=1.6 if main else 0.5, alpha=1 if main else 0.5, zorder=1)
    for name, (x, y) in places.items():
        far = name in first and first[name]["zone"] != "home"
        face = "#f3ddd4" if far else "#dbe5f1"
        axis.text(x, y, name, ha="center", va="center", fontsize=8, zorder=2, bbox={"boxstyle": "round", "fc": face})
    axis.margins(0.12)
    axis.axis("off")


def main() -> int:
    """Draw those that are named, or all."""
    names = sys.argv[1:]
    paths = [FOLDER / f"{name}.json" for name in names] if names else sorted(FOLDER.glob("*.json"))
    for path in paths:
        print(draw(path))
    return 0


if __name__ == "__main__":
    sys.exit(main())
