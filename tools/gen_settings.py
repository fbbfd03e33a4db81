"""Write the table of all settings in docs/operations.md from the configuration records.

python -m tools.gen_settings            write the table
python -m tools.gen_settings --check    exit with 1 if it is not up to date
"""

from __future__ import annotations

import sys
from pathlib import Path

from tensorhub_core.config import ClientConfig
from tensorhub_core.settings import Key, keys

PAGE = Path(__file__).resolve().parent.parent / "docs" / "operations.md"
BEGIN = "<!-- settings: written by tools/gen_settings.py, `make docs` -->\n"
END = "<!-- end of settings -->\n"


def render() -> str:
    """Return the table, those of workers before those of the server."""
    rows = ["| setting | of | default | meaning |", "|---|---|---|---|"]
    rows += [f"| `{key.name}` | {_owner(key)} | {_default(key)} | {_doc(key)} |" for key in keys().values()]
    return "\n".join(rows) + "\n"


def _owner(key: Key) -> str:
    return "workers" if key.record is ClientConfig else "the server"


def _default(key: Key) -> str:
    return "" if key.default in (None, "") else f"`{key.default}`"


def _doc(key: Key) -> str:
    choices = f" ({', '.join(f'`{choice}`' for choice in key.choices)})" if key.choices else ""
    return key.doc.replace("|", "\\|") + choices


def written(page: str) -> str:
    """Return the page with the table as it should be; raises ValueError if its marks are missing."""
    before, _, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not end:
        raise ValueError("the page lacks the marks between which the settings stand")
    return before + BEGIN + "\n" + render() + "\n" + END + after


def main(arguments: list[str]) -> int:
    """Write the table, or check it; returns the exit code."""
    page = PAGE.read_text(encoding="utf-8")
    wanted = written(page)
    if "--check" in arguments:
        if page != wanted:
            print("docs/operations.md: the settings are not up to date, run `make docs`", file=sys.stderr)
        return int(page != wanted)
    PAGE.write_text(wanted, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
