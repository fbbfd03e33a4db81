"""Have Python look for cycles seldom, in a process that is a hub and nothing else.

What the machine lets go of is freed at once: it has no cycles. A full look goes through all that is known of all
workers, and so takes the longer the more there are: with four thousand workers a fifth of the time of a version.
"""

from __future__ import annotations

import gc

NEW_OBJECTS = 10_000
"""Objects more than before that are looked through, the new ones alone."""
YOUNG_LOOKS = 20
"""Looks at the new ones before one at those that are a little older."""
MIDDLE_LOOKS = 100
"""Those, before one at everything."""


def collect_seldom() -> None:
    """Leave out what is there already, which stays, and look through what comes in larger lots."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(NEW_OBJECTS, YOUNG_LOOKS, MIDDLE_LOOKS)
