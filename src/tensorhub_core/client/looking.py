"""Look at how far the sources of unfinished copies are, by reading the words in which they show it.

A follower that has read all that it may does not wait for the hub to tell it of more: it reads eight bytes of its
source's memory, again and again while nothing new comes, and goes on. When is decided in `Look`, pure.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

import numpy as np

from tensorhub_core.client.backlog import Backlog
from tensorhub_core.client.lanes import Lane, Lanes
from tensorhub_core.client.peers import AttachedPeer
from tensorhub_core.client.prefix_word import MOST_LANDINGS, WORD_BYTES, segments_in
from tensorhub_core.client.readjob import ReadJob
from tensorhub_core.errors import TransportError
from tensorhub_core.transport.base import Batch, Progress, ReadId, ReadState, Transport

LEAST_PAUSE_S = 0.25e-3
MOST_PAUSE_S = 8e-3
EARLY_SHARE = 0.7
"""There is no sense in a look before this share of the time has passed after which news came lately."""
PAUSE_SHARE = 1 / 8
"""After that, a pause is this share of it: so much later than they could news come."""
_POLL_PAUSE_S = 50e-6


@dataclass(slots=True)
class Look:
    """When to look at one source; pure, time is an argument.

    A source that shows more at even times is looked at when more is due, and a few times until it is there. One that
    does not is looked at soon after news, then less and less often.
    """

    pause_s: float = LEAST_PAUSE_S
    due_s: float = -math.inf
    asked_s: float | None = None
    """Since when an answer is waited for."""
    behind: bool = False
    """The last look was asked for behind something else: its answer may have been old when it came."""
    posted: bool = False
    """More was asked for since the last look."""
    usual_s: float = 0.0
    """After how long news came lately; 0 = not known yet."""
    news_s: float | None = None
    """When there were news last."""

    def asked(self, now: float, behind: bool = False) -> None:
        """Note that it is looked now, maybe `behind` something that was asked for before."""
        self.asked_s, self.behind, self.posted = now, behind, False

    def is_due(self, free: bool, now: float) -> bool:
        """Tell whether to look; `free`: nothing that was asked for is on its way any more.

        Once with every batch: where answers come in order, its answer is there when that has landed and no sooner.
        """
        return self.posted or now >= self.due_s or (free and self.behind)

    def answered(self, news: bool, now: float) -> None:
        """Note what came of it."""
        self.asked_s = None
        if news:
            self._learn(now)
            self.pause_s = min(max(LEAST_PAUSE_S, PAUSE_SHARE * self.usual_s), MOST_PAUSE_S)
            self.due_s = now + min(max(self.pause_s, EARLY_SHARE * self.usual_s), MOST_PAUSE_S)
            return
        late = self.news_s is None or now - self.news_s >= 2 * self.usual_s
        if late and not self.behind:
            self.pause_s = min(2 * self.pause_s, MOST_PAUSE_S)
        self.due_s = now + self.pause_s

    def _learn(self, now: float) -> None:
        """Learn from news how long they take."""
        if self.news_s is not None:
            took_s = now - self.news_s
            self.usual_s = (self.usual_s + min(took_s, 4 * self.usual_s)) / 2 if self.usual_s else took_s
        self.news_s = now

    def excused(self, now: float) -> None:
        """Begin to wait anew: until now it was not the source that kept us waiting."""
        self.asked_s = None if self.asked_s is None else now

    def stalled(self, timeout_s: float, now: float) -> str:
        """Return why the source counts as stalled, or an empty text."""
        if self.asked_s is None or now - self.asked_s < timeout_s:
            return ""
        return f"how far it is could not be read for {now - self.asked_s:.1f} s"


class Looks:
    """The looks of one job; on the executor thread. At most one per source is under way."""

    def __init__(self, job: ReadJob, transport: Transport, lanes: Lanes, stall_timeout_s: float) -> None:
        """Look at sources that are not whole, show a word, and whose checksums are known: all that is read is compared.

        Without a page to land in, or where not everything is compared, the hub alone says how far to read.
        """
        self._job, self._transport, self._stall_timeout_s = job, transport, stall_timeout_s
        self._page = job.destination.page
        blind = self._page is None or job.checker.chosen is not None
        self._lanes = [] if blind else [lane for lane in lanes.all if self._has_word(lane)]
        self._looks = {lane.source: Look() for lane in self._lanes}
        self._reads: dict[int, ReadId] = {}
        self._unquiet = False
        self._next_s = math.inf

    @property
    def reads(self) -> Mapping[int, ReadId]:
        """Return the looks that are under way, by source."""
        return self._reads

    def wait_s(self, now: float) -> float:
        """Return for how long there is nothing to look at."""
        return max(0.0, self._next_s - now)

    def paused(self, now: float) -> None:
        """Forget the time until now: this process did not run, so no source is to blame."""
        for look in self._looks.values():
            look.excused(now)

    def turn(
        self, backlog: Backlog, working: Collection[int], attach: Callable[[Lane], AttachedPeer], now: float
    ) -> bool:
        """Look where a source has nothing left that may be read; returns whether one has come on.

        Raises SourceFailed for one that cannot be read.
        """
        moved, self._next_s = False, math.inf
        for lane in self._lanes:
            look = self._looks[lane.source]
            if lane.source in self._reads:
                moved = self._hear(lane, look, self._transport.poll(self._reads[lane.source]), now) or moved
            if lane.source not in self._reads and self._nears_end(lane, backlog, working):
                if look.is_due(not lane.flights, now):
                    moved = self._ask(lane, look, attach(lane), now) or moved
                if lane.source not in self._reads:
                    self._next_s = min(self._next_s, look.due_s)
        return moved

    def let_land(self, limit_s: float) -> None:
        """Let what is under way land, for a short time."""
        end = time.monotonic() + limit_s
        while self._reads and time.monotonic() < end:
            for source, read in list(self._reads.items()):
                if self._transport.poll(read).state is not ReadState.ACTIVE:
                    self._close(source)
            if self._reads:
                time.sleep(_POLL_PAUSE_S)

    def close(self) -> bool:
        """Close what is under way; returns whether all that ever was is quiet."""
        for source in list(self._reads):
            self._close(source)
        return not self._unquiet

    def _close(self, source: int) -> bool:
        quiet = self._transport.close(self._reads.pop(source))
        self._unquiet = self._unquiet or not quiet
        return quiet

    def _has_word(self, lane: Lane) -> bool:
        source = self._job.sources[lane.source]
        return bool(source.word and source.known is None and lane.source < MOST_LANDINGS)

    def posted(self, lane: Lane, backlog: Backlog, working: Collection[int], now: float) -> bool:
        """Note that a batch was posted, and look if it is time to; returns whether the source has come on."""
        look = self._looks.get(lane.source)
        if look is None:
            return False
        look.posted = True
        if lane.source in self._reads or not self._nears_end(lane, backlog, working):
            return False
        assert lane.attached is not None
        return self._ask(lane, look, lane.attached, now)

    def _nears_end(self, lane: Lane, backlog: Backlog, working: Collection[int]) -> bool:
        """Tell whether no more may be asked for than is on its way.

        Where all goes one after the other, a look then comes half-way, and its answer before there is nothing to do:
        the way there and back may take as long as a batch, and a link that rests is behind for good.
        """
        if lane.left or not backlog or self._job.allowed(lane.source) >= lane.segments:
            return False
        span = lane.next_span(backlog, working, self._job)
        return span is None or self._job.schedule.bytes_of(*span[:2]) <= lane.pace.flying_bytes

    def _ask(self, lane: Lane, look: Look, peer: AttachedPeer, now: float) -> bool:
        assert self._page is not None
        here, there = self._page.landing(lane.source), self._job.sources[lane.source].word
        batch = Batch(np.array([here], np.uint64), np.array([there], np.uint64), np.array([WORD_BYTES], np.uint64))
        try:
            read = self._transport.post(peer.peer, batch)
        except TransportError as error:
            raise lane.failed("lost", str(error)) from None
        self._reads[lane.source] = read
        look.asked(now, behind=lane.flights > 0)
        return self._hear(lane, look, self._transport.poll(read), now)

    def _hear(self, lane: Lane, look: Look, progress: Progress, now: float) -> bool:
        """Take the answer to a look, if there is one; returns whether the source has come on."""
        if progress.state is ReadState.FAILED:
            raise lane.failed("lost", progress.error)
        if progress.state is ReadState.ACTIVE:
            if lane.flights:
                look.excused(now)  # it may be behind what was asked for before, which is watched by itself
            why = look.stalled(self._stall_timeout_s, now)
            if why:
                raise lane.failed("stalled", why)
            return False
        if not self._close(lane.source):
            raise lane.failed("lost", "a look was reported done, and then that it may still write")
        assert self._page is not None
        assert lane.attached is not None
        lane.attached.proven = True
        source = self._job.sources[lane.source]
        segments = segments_in(self._page.landed(lane.source), source.tag, lane.segments)
        news = segments > self._job.allowed(lane.source)
        if news:
            self._job.advance(lane.lease, segments)
        look.answered(news, now)
        return news
