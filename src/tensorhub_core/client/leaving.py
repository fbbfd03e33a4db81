"""Leave in order: hand over what is retained through this worker (law L11), take its copies back, say goodbye."""

from __future__ import annotations

import time
from dataclasses import dataclass

from tensorhub_core.client.awaiting import Awaited
from tensorhub_core.client.holding import Holding
from tensorhub_core.client.identity import Identity, checked
from tensorhub_core.client.resources import Resources
from tensorhub_core.client.runner import RoundRunner
from tensorhub_core.client.staged import Stager
from tensorhub_core.clock import Deadline
from tensorhub_core.errors import DeadlineExceeded, TensorHubError
from tensorhub_core.ids import VersionKey
from tensorhub_core.observe.log import get_logger
from tensorhub_core.state.messages import HandOver, Reply

_LEAVE_S = 1.0


@dataclass(frozen=True, slots=True)
class Leaving:
    """The end of one worker's stay with its server."""

    identity: Identity
    resources: Resources
    holding: Holding
    stager: Stager
    runner: RoundRunner

    def leave(self, handover_s: float, drain_s: float) -> None:
        """Hand over, withdraw and leave; bounded by the two and a second, never raises but what interrupts the thread.

        Nobody may use the worker any more.
        """
        session = self.resources.session
        try:
            if not self.identity.spot and handover_s > 0:
                self.hand_over(Deadline.after(handover_s, time.monotonic()))
            elif self._versions():
                session.submit(HandOver(), lambda _: None)  # so that no copy is asked for that would go with the worker
        except TensorHubError as error:
            get_logger("client").warning("%s", error)
        self.resources.offloads.refuse()
        deadline = Deadline.after(drain_s, time.monotonic())
        self.stager.let_go(deadline)
        if self.holding.published:
            try:
                session.result(self.runner.drain.begin()[0], deadline, "unpublish()")
            except TensorHubError as error:
                held = "?" if self.holding.held is None else self.holding.held[1]
                get_logger("client").warning("closed while version %s had readers: %s", held, error)
        session.leave(_LEAVE_S)

    def hand_over(self, deadline: Deadline) -> None:
        """Wait until no retained version depends on this worker's replica; raises what the server says if none will.

        From now on no version relies on it, whatever comes of this.
        """
        versions = sorted(self._versions())
        if not versions:
            return
        session, future = self.resources.session, Awaited[Reply]()
        numbers = ", ".join(str(key[1]) for key in versions)
        mine = self.identity
        who = "the last reliable holder" if mine.num_shards == 1 else f"shard {mine.shard} of the last reliable holder"
        what = f"{who} of version {numbers} of model {mine.model!r} leaves"
        advice = "`tensorhub seed --keep` keeps versions"
        number = session.submit(HandOver(), future.set_result)
        try:
            checked(session.result(future, deadline, "the hand-over"))
        except DeadlineExceeded:
            session.forget(number)
            raise DeadlineExceeded(f"{what}: nobody took it over in time; {advice}") from None
        except TensorHubError as error:
            raise type(error)(f"{what}: {error}; {advice}") from None

    def _versions(self) -> set[VersionKey]:
        room = self.resources.room
        found = set(self.resources.offloads.versions())
        if self.holding.held is not None and (self.holding.published or self.holding.draining):
            found.add(self.holding.held)
        if room.holds is not None:
            found.add(room.holds[0])
        return found
