"""Name the loggers of all parts under one root, so that a program configures them together."""

from __future__ import annotations

import logging

ROOT = "tensorhub"


def get_logger(part: str = "") -> logging.Logger:
    """Return the standard logger `tensorhub.PART`, or the root of all of them; sets no handler and no level."""
    return logging.getLogger(f"{ROOT}.{part}" if part else ROOT)
