"""Print whether the installed SGLang suits the adapter: `python -m tensorhub_sglang.check`; exit code 1 if not."""

from __future__ import annotations

import sys

from tensorhub_sglang.plug_points import (
    PLUG_POINTS,
    SGLangUnsuitable,
    find_problems,
    installed_folder,
    installed_version,
)


def main() -> int:
    """Check the installed SGLang, print what was found, return the exit code."""
    try:
        problems = find_problems(installed_folder())
    except SGLangUnsuitable as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(
        f"SGLang {installed_version()}: {len(PLUG_POINTS) - len(problems)} of {len(PLUG_POINTS)} plug-in points found"
    )
    for problem in problems:
        print(f"  missing: {problem}")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
