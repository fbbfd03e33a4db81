"""When a read takes no more of a segment than it needs, and what is verified stays so when that changes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tensorhub_core.config import ClientConfig
from tensorhub_core.layout.cuts import ExactPolicy
from tensorhub_core.layout.read_plan import ReadPlan

_PATIENCE_SHARE = 0.5
"""Of what a source may give nothing: one that does not answer is then read in whole segments, and may stall at that."""


@dataclass(frozen=True, slots=True)
class Exactness:
    """How a worker reads other layouts: by cuts if there is a `policy`, whose checksums it asks for if it compares any.

    A source that answers nothing for `patience_s` is asked no more.
    """

    policy: ExactPolicy | None = None
    ask: bool = True
    patience_s: float = 2.5

    @classmethod
    def of(cls, config: ClientConfig) -> Exactness:
        """Return what the settings say."""
        policy = ExactPolicy(min_run_bytes=config.min_run_bytes) if config.min_run_bytes else None
        return cls(policy, config.verify != "off", _PATIENCE_SHARE * config.stall_s)


WHOLE_SEGMENTS = Exactness()
"""Whole segments are read, so that nothing is asked."""


def carried_over(before: ReadPlan, verified: NDArray[np.bool_], after: ReadPlan) -> NDArray[np.bool_]:
    """Return which reads of `after` are in place, bool [reads]: all that `before` read of their segments is verified.

    Both plan the same destination and sources, so that they need the same bytes of each segment, in cuts or as a whole.
    """
    if len(verified) == len(after) and np.array_equal(before.cut, after.cut):
        return verified
    keys, which = np.unique(_keys(before), return_inverse=True)
    missing = np.bincount(which, weights=~verified, minlength=len(keys))
    wanted = _keys(after)
    at = np.minimum(np.searchsorted(keys, wanted), max(0, len(keys) - 1))
    known = keys[at] == wanted if len(keys) else np.zeros(len(wanted), np.bool_)
    return np.asarray(known & (missing[at] == 0) if len(keys) else known, np.bool_)


def _keys(plan: ReadPlan) -> NDArray[np.int64]:
    return (plan.source.astype(np.int64) << 32) + plan.segment
