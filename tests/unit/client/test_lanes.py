"""How a reader names the failure of a source: only what gave nothing at all is taken for out of reach."""

from __future__ import annotations

import pytest

from tensorhub_core.client.flow import Flow, FlowSettings
from tensorhub_core.client.lanes import Lane
from tensorhub_core.client.pace import Pace
from tensorhub_core.client.peers import AttachedPeer
from tensorhub_core.transport.base import PeerId


@pytest.mark.parametrize(
    ("kind", "gave_bytes", "named"),
    [
        ("lost", False, "unreachable"),
        ("stalled", False, "unreachable"),
        ("slow", False, "slow"),
        ("lost", True, "lost"),
        ("stalled", True, "stalled"),
        ("slow", True, "slow"),
    ],
)
def test_a_source_that_is_only_slower_than_others_is_not_out_of_reach(kind: str, gave_bytes: bool, named: str) -> None:
    lane = Lane(0, "lease", 1, Flow(FlowSettings()), Pace(), AttachedPeer(PeerId("peer"), gave_bytes))
    assert lane.failed(kind, "").kind == named
