"""The entry point that SGLang calls in each of its processes before it parses its arguments."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Sequence

from tensorhub_sglang.compat import find_problems, installed_folder, installed_version

FLAG = "--weight-source"
NAME = "tensorhub"


def register() -> None:
    """Refuse a start that asks for `--weight-source tensorhub`, with the reason; do nothing otherwise.

    SGLang logs an exception of a plug-in and goes on, and would then serve weights from elsewhere: so the process ends,
    by SystemExit.
    """
    if not is_wanted(sys.argv[1:]):
        return
    problems = find_problems(installed_folder())
    if problems:
        listed = "".join(f"\n  {problem}" for problem in problems)
        raise SystemExit(f"{FLAG} {NAME}: SGLang {installed_version()} lacks what the adapter plugs into:{listed}")
    raise SystemExit(
        f"{FLAG} {NAME}: this release of tensorhub-sglang can check an SGLang installation (version "
        f"{installed_version()} has all plug-in points) but not fill its weights; "
        f"use vLLM, or start SGLang without {FLAG}"
    )


def is_wanted(arguments: Sequence[str]) -> bool:
    """Tell whether a command line asks for weights from TensorHub."""
    return f"{FLAG}={NAME}" in arguments or (FLAG, NAME) in itertools.pairwise(arguments)
