"""The command as users type it: an interpreter of its own that spawns its rank, nothing forked. Not in CI: it is slow.

make nightly-sglang
"""

from __future__ import annotations

import pytest

from tensorhub_core import Server

from ..models import Checkpoints, training
from .server import FLOAT32, Servers

pytestmark = pytest.mark.timeout(400)
KIND = "tied-float32"


def test_the_command_starts_from_a_hub_and_swaps(servers: Servers, checkpoints: Checkpoints, hub: Server) -> None:
    config = {"server": hub.address, "follow": False, "timeout_s": 60}
    with (
        training(hub.address, checkpoints(KIND, 1)) as trainer,
        servers.running(checkpoints.bare(KIND), *FLOAT32, config=config, forked=False) as server,
    ):
        assert server.answers() == servers.fresh(checkpoints(KIND, 1), *FLOAT32).answers
        trainer.publish(checkpoints(KIND, 2), 2)
        reply = server.update(version=2)
        assert (reply.status_code, reply.json()["version"]) == (200, 2), reply.text
        assert server.answers() == servers.fresh(checkpoints(KIND, 2), *FLOAT32).answers
