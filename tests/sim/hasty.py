"""A random world in which readers update now and then although a newer version waits in their staging memory."""

from __future__ import annotations

from tensorhub_core.state.messages import JoinRound
from tests.sim.lives import Life
from tests.sim.world import World


class HastyWorld(World):
    """What is staged is not held: in every second round a reader asks for the newest version all the same."""

    def join(self, life: Life) -> None:
        """Join the next round."""
        if life.staged is None or life.published is None or life.round % 2:
            return super().join(life)
        life.mode = "update"
        life.ask(JoinRound(life.round, None, "update", (1, life.published)))
        life.phase = "joining"
