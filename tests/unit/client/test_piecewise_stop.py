"""An order to stop that comes when the read of a portion has just ended."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tensorhub_core.client.piecewise_round import PiecewiseDriver
from tensorhub_core.client.reading import ReadEnd, ReadOutcome
from tensorhub_core.client.rounds import Phase


@pytest.mark.parametrize("phase", [Phase.STOPPING, Phase.LEAVING])
def test_no_further_portion_is_begun_after_an_order_to_stop(phase: Phase) -> None:
    driver: Any = object.__new__(PiecewiseDriver)
    driver._state = SimpleNamespace(phase=phase)
    driver._passage = SimpleNamespace(complete=False)  # anything else that it is asked for is an error
    ended = ReadOutcome(ReadEnd.VERIFIED, np.ones(1, np.bool_), 8)
    handle: Any = SimpleNamespace(wait=lambda timeout_s: ended)
    outcome = driver._wait(handle)
    assert outcome.end is ReadEnd.CANCELLED
