"""The entry point that SGLang calls in each of its processes before it parses its arguments.

SGLang logs what a plug-in raises and goes on without it. That is safe here: without this one `--weight-source` is no
argument, and the load format that it stands for is unknown. What fails later, where weights are wanted from a hub, ends
the process with the reason.
"""

from __future__ import annotations

import functools
import itertools
import logging
import sys
from collections.abc import Sequence
from typing import Any

from tensorhub_core.errors import ConfigError
from tensorhub_sglang import ATTRIBUTE, BACKEND, arguments
from tensorhub_sglang.plug_points import find_problems, installed_folder, installed_version

FLAG = "--weight-source"
logger = logging.getLogger(__name__)


def register() -> None:
    """Register our arguments and our load format with SGLang, and nothing that changes an engine without them.

    Ends the process, by SystemExit, if its command line asks for weights from a hub and this SGLang does not suit.
    """
    wanted = is_wanted(sys.argv[1:])
    if wanted:
        check_installation()
    try:
        _register()
    except Exception as error:
        if wanted:
            raise SystemExit(f"{FLAG} {BACKEND}: SGLang {installed_version()} does not suit: {error}") from error
        logger.info("SGLang %s does not suit %s %s: %s", installed_version(), FLAG, BACKEND, error)


def _register() -> None:
    from tensorhub_sglang import compat

    compat.add_hooks(arguments.add_arguments, read_arguments, check, BACKEND, _loader)
    compat.take_engine_arguments(lambda original: arguments.server_args_maker(original, prepare_server))


def is_wanted(given: Sequence[str]) -> bool:
    """Tell whether a command line asks for weights from TensorHub."""
    return f"{FLAG}={BACKEND}" in given or (FLAG, BACKEND) in itertools.pairwise(given)


def check_installation() -> None:
    """End the process, by SystemExit, if the installed SGLang lacks a place where the adapter plugs in."""
    problems = _installed_problems()
    if problems:
        listed = "".join(f"\n  {problem}" for problem in problems)
        raise SystemExit(f"{FLAG} {BACKEND}: SGLang {installed_version()} lacks what the adapter plugs into:{listed}")


def read_arguments(fields: dict[str, Any]) -> dict[str, Any]:
    """Put what our arguments stand for into SGLang's own; ends the process for contradictions."""
    try:
        ours = arguments.with_our_fields(fields)
    except ConfigError as error:
        raise SystemExit(f"{FLAG}: {error}") from error
    if ours.get("load_format") == BACKEND:
        prepare_server()
    return ours


def prepare_server() -> None:
    """Hook the part of SGLang that takes requests, in the process where it will run; again changes nothing.

    Ends the process, by SystemExit, rather than let it serve weights that nobody manages.
    """
    from tensorhub_sglang import compat

    check_installation()
    try:
        if not compat.is_hooked(compat.MANAGER):
            from tensorhub_sglang import managed, rank

            managed.install(arguments.config_of, rank.handle, ATTRIBUTE)
        compat.apply_hooks()
    except Exception as error:
        raise SystemExit(f"{FLAG} {BACKEND}: SGLang {installed_version()} does not suit: {error}") from error


def check(server_args: Any) -> None:
    """Refuse options that do not work with a hub, as soon as SGLang has resolved them; raises ConfigError."""
    from tensorhub_sglang import compat

    if arguments.config_of(server_args) is None:
        return
    prepare_server()
    options = compat.resolved(server_args)
    if options.load_format != BACKEND:
        raise ConfigError(f"for this --model-path SGLang takes load format {options.load_format!r}: use a local folder")
    compat.check_supported(options)


@functools.cache
def _installed_problems() -> tuple[str, ...]:
    return find_problems(installed_folder())


def _loader() -> type:
    from tensorhub_sglang.loader import TensorHubLoader

    return TensorHubLoader
