"""Read the marked code blocks of a page.

A fenced block's info string says what it is: `python file=NAME` is written to a file of that name, `sh run` is run in
the folder of those files, and a `text expect` block after it shows what it prints.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path

_BLOCK = re.compile(r"^```(?P<language>\w*)(?P<marks>[^\n]*)\n(?P<body>.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Run:
    """One `sh run` block, the files that were shown before it, and what it should print."""

    script: str
    files: dict[str, str]
    expected: list[str] = field(default_factory=list)


def runs_of(page: Path) -> list[Run]:
    """Return the runs of a page in order."""
    files: dict[str, str] = {}
    runs: list[Run] = []
    for block in _BLOCK.finditer(page.read_text(encoding="utf-8")):
        marks = block["marks"].split()
        named = [mark.removeprefix("file=") for mark in marks if mark.startswith("file=")]
        if named:
            files[named[0]] = block["body"]
        elif block["language"] == "sh" and "run" in marks:
            runs.append(Run(block["body"], dict(files)))
        elif "expect" in marks:
            runs[-1].expected.extend(line for line in block["body"].splitlines() if line.strip())
    return runs


def pattern_of(line: str) -> str:
    """Return a line with every number and every run of blanks and rulers made equal, for comparing outputs."""
    masked = re.sub(r"\d+(?:[.,]\d+)*", "#", line)
    return re.sub(r"[\s─━│┃┏┓┗┛┡┩└┘├┤┬┴┼╇]+", " ", masked).strip()


def missing_lines(expected: list[str], printed: str) -> list[str]:
    """Return the expected lines that were not printed, looking for them in order; numbers may differ."""
    waiting = [pattern_of(line) for line in printed.splitlines()]
    missing = []
    for line in expected:
        wanted = pattern_of(line)
        if wanted in waiting:
            waiting = waiting[waiting.index(wanted) + 1 :]
        else:
            missing.append(line)
    return missing
