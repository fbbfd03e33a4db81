"""Vouch for parts of what this worker holds: compute the checksums of cuts that readers ask for (law L12).

One thread does it, and ends when there is nothing to do. What it has computed it remembers, and which cuts were asked
for lately: of the next version it computes them right after the publish, before anybody asks.
"""

from __future__ import annotations

import contextlib
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import xxhash

from tensorhub_core.client.device import DeviceMemory, TorchMemory
from tensorhub_core.client.session import Session
from tensorhub_core.client.stock import Stock, sum_cuts
from tensorhub_core.client.sums import pack_sums
from tensorhub_core.errors import CorruptTransfer, LayoutMismatch, TensorHubError
from tensorhub_core.layout.cuts import Cuts, unpack_cuts
from tensorhub_core.limits import start_thread
from tensorhub_core.observe.log import get_logger
from tensorhub_core.state.bounds import MOST_DETAIL
from tensorhub_core.state.messages import GiveSums, SumsWanted
from tensorhub_core.state.requests import Refusal

MOST_WAITING = 512
"""Questions that wait for the thread."""
_WAITING_BYTES = 32 << 20
_ANSWERS_BYTES = 16 << 20
_LATELY_BYTES = 16 << 20
_MOST_TOGETHER = 16
"""Sets of cuts of the same segments that are summed together, so that those are compared once."""
_UNASKED_VERSIONS = 2
"""Cuts that nobody asked for in so many versions are computed in advance no more."""
_JOIN_S = 10.0

Find = Callable[[bytes], "Stock | None"]
"""Return what lies at the placement of this digest, None if nothing is offered there; any thread."""


@dataclass(slots=True, eq=False)
class _Question:
    """Cuts of a version, asked for by a reader (`ticket`), or to be computed in advance (none)."""

    ticket: str
    life: int
    placement: bytes
    sums: bytes
    data: bytes
    key: tuple[bytes, bytes]
    """The manifest, and the digest of the cuts."""
    cuts: Cuts | None = None


@dataclass(slots=True)
class _Lately:
    """Cuts that were asked for, of a layout, and how many versions ago."""

    layout: bytes
    data: bytes
    unasked: int = 0


class Voucher:
    """The answers of one worker. `on_push` is called on the session's thread, the rest from any."""

    def __init__(self, session: Session, find: Find, devices: DeviceMemory | None = None) -> None:
        self._session, self._find = session, find
        self._devices = TorchMemory() if devices is None else devices
        self._lock = threading.RLock()  # entered in one step: no interruption leaves it held
        self._asked: deque[_Question] = deque()
        self._ahead: deque[_Question] = deque()
        self._waiting_bytes = 0
        self._answers: OrderedDict[tuple[bytes, bytes], bytes] = OrderedDict()
        self._answers_bytes = 0
        self._lately: OrderedDict[bytes, _Lately] = OrderedDict()
        self._lately_bytes = 0
        self._thread: threading.Thread | None = None
        self._reading = self._halt = self._closed = False
        self._when_unread: list[Callable[[], None]] = []
        self.computed = 0
        """Sets of cuts whose checksums were computed, since the worker connected."""

    def on_push(self, message: SumsWanted) -> None:
        """Hear what a reader wants to know: answered at once if it is known already. Never blocks."""
        digest = xxhash.xxh3_128_digest(message.cuts)
        question = _Question(
            message.ticket, self._session.hellos, message.placement, message.sums, message.cuts, (message.sums, digest)
        )
        with self._lock:
            known = self._answers.get(question.key)
            if known is None and not self._queue(question):
                return self._refuse(question, "wait", "too much is asked at the moment")
            self._note_asked(digest)
        if known is not None:
            return self._give(question, known)
        self._wake()

    def look_ahead(self, stock: Stock) -> None:
        """Compute of a version that was just published, in the background, what was asked for of the ones before."""
        with self._lock:
            self._ahead.clear()
            for digest, lately in list(self._lately.items()):
                if lately.layout != stock.layout:
                    continue
                lately.unasked += 1
                if lately.unasked > _UNASKED_VERSIONS:
                    self._forget(digest)
                    continue
                key = (stock.sums.digest, digest)
                if key not in self._answers:
                    self._ahead.append(_Question("", 0, stock.placement, key[0], lately.data, key))
        self._wake()

    def release(self, done: Callable[[], None]) -> None:
        """Call `done()` when nothing is read any more of the registered memory: then it is the caller's again.

        At once, or on the thread that reads, after the segments that it reads at the moment; never blocks.
        """
        with self._lock:
            self._ahead.clear()
            reading = self._reading
            self._halt = reading
            if reading:
                self._when_unread.append(done)
        if not reading:
            done()

    def close(self) -> None:
        """Answer nothing any more; joins the thread within a bounded time. Idempotent, never raises."""
        with self._lock:
            self._closed = self._halt = True
            self._asked.clear()
            self._ahead.clear()
            thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(_JOIN_S)
            if thread.is_alive():  # what it reads lives as long as it does
                get_logger("client").error("checksums of cuts are still being computed")

    # --- under the lock ---------------------------------------------------------------------------------------------

    def _queue(self, question: _Question) -> bool:
        if self._closed or len(self._asked) >= MOST_WAITING:
            return False
        if self._asked and self._waiting_bytes + len(question.data) > _WAITING_BYTES:
            return False
        self._asked.append(question)
        self._waiting_bytes += len(question.data)
        return True

    def _next(self) -> list[_Question]:
        """Take what is to be answered next: readers' questions first, and with one those of the same kind."""
        queue = self._asked or self._ahead
        if not queue or self._closed:
            return []
        first = queue[0]
        found = [each for each in queue if (each.placement, each.sums) == (first.placement, first.sums)]
        for question in found:
            queue.remove(question)
        if queue is self._asked:
            self._waiting_bytes -= sum(len(question.data) for question in found)
        return found

    def _put_back(self, questions: Sequence[_Question]) -> None:
        """Let questions wait again, in front of the others."""
        for question in reversed(questions):
            if question.ticket:
                self._asked.appendleft(question)
                self._waiting_bytes += len(question.data)
            else:
                self._ahead.appendleft(question)

    def _remember(self, question: _Question, layout: bytes, answer: bytes) -> None:
        self._answers_bytes += len(answer) - len(self._answers.pop(question.key, b""))
        self._answers[question.key] = answer
        while self._answers_bytes > _ANSWERS_BYTES and len(self._answers) > 1:
            self._answers_bytes -= len(self._answers.popitem(last=False)[1])
        digest = question.key[1]
        if not question.ticket:
            return
        self._forget(digest)
        self._lately[digest] = _Lately(layout, question.data)
        self._lately_bytes += len(question.data)
        while self._lately_bytes > _LATELY_BYTES:
            self._forget(next(iter(self._lately)))

    def _note_asked(self, digest: bytes) -> None:
        if digest in self._lately:
            self._lately[digest].unasked = 0

    def _forget(self, digest: bytes) -> None:
        gone = self._lately.pop(digest, None)
        self._lately_bytes -= 0 if gone is None else len(gone.data)

    # --- the thread -------------------------------------------------------------------------------------------------

    def _wake(self) -> None:
        """See to it that the thread runs."""
        with self._lock:
            if self._thread is not None or self._closed or not (self._asked or self._ahead):
                return
            thread = threading.Thread(target=self._run, name="tensorhub-vouch", daemon=True)
            try:
                start_thread(thread)
            except TensorHubError as error:
                unanswered, self._waiting_bytes = list(self._asked), 0
                self._asked.clear()
                self._ahead.clear()
                for question in unanswered:
                    self._refuse(question, "unable", str(error))
                return
            self._thread = thread

    def _run(self) -> None:
        while True:
            with self._lock:
                questions = self._next()
                if not questions:
                    self._thread = None
                    return
                self._reading, self._halt = True, self._closed
            try:
                self._answer(questions)
            finally:
                with self._lock:
                    self._reading, waiting, self._when_unread = False, self._when_unread, []
                for done in waiting:
                    done()

    def _answer(self, questions: list[_Question]) -> None:
        """Answer of some questions about one version the first, and with it those about the same segments."""
        stock = self._find(questions[0].placement)
        if stock is None or stock.sums.digest != questions[0].sums:
            # It may have just been told of its commit and not noted it yet; or the reader will hear that it is gone.
            return self._refuse_all(questions, "wait", "it does not hold the version at the moment")
        ready = [question for question in questions if self._prepare(question, stock)]
        if not ready:
            return
        segments, kinds = _range(ready[0]), dict[tuple[bytes, bytes], Cuts]()
        for question in ready:
            if _range(question) == segments and (question.key in kinds or len(kinds) < _MOST_TOGETHER):
                kinds.setdefault(question.key, _cuts(question))
        together = [question for question in ready if question.key in kinds]
        with self._lock:
            self._put_back([question for question in ready if question.key not in kinds])
        try:
            found = sum_cuts(stock, list(kinds.values()), self._stops, self._devices)
        except CorruptTransfer as error:
            if self._find(questions[0].placement) != stock:
                return self._refuse_all(together, "wait", "it does not hold the version any more")
            if questions[0].ticket:
                get_logger("client").error("%s", error)
            return self._refuse_all(together, "corrupt", str(error))
        except Exception as error:
            get_logger("client").exception("checksums of cuts could not be computed")
            return self._refuse_all(together, "unable", f"{type(error).__name__}: {error}")
        if found is None:
            return self._refuse_all(together, "wait", "the version is being withdrawn")
        answers = dict(zip(kinds, map(pack_sums, found), strict=True))
        with self._lock:
            self.computed += len(answers)
            for question in together:
                self._remember(question, stock.layout, answers[question.key])
        for question in together:
            self._give(question, answers[question.key])

    def _prepare(self, question: _Question, stock: Stock) -> bool:
        """Decode a question's cuts; answers it if it is known by now or makes no sense, and then returns False."""
        with self._lock:
            known = self._answers.get(question.key)
            if question.ticket:
                self._note_asked(question.key[1])
        if known is not None:
            self._give(question, known)
            return False
        if question.cuts is None:
            try:
                question.cuts = unpack_cuts(question.data, stock.memory.table)
            except LayoutMismatch as error:
                self._refuse(question, "unable", str(error))
                return False
        return True

    def _stops(self) -> bool:
        return self._halt

    def _give(self, question: _Question, answer: bytes) -> None:
        self._say(question, GiveSums(question.ticket, answer))

    def _refuse_all(self, questions: Sequence[_Question], refusal: Refusal, detail: str) -> None:
        for question in questions:
            self._refuse(question, refusal, detail)

    def _refuse(self, question: _Question, refusal: Refusal, detail: str) -> None:
        self._say(question, GiveSums(question.ticket, b"", refusal, detail[:MOST_DETAIL]))

    def _say(self, question: _Question, message: GiveSums) -> None:
        """Answer in the session's life in which it was asked: another server knows no ticket of this one."""
        if question.ticket:
            with contextlib.suppress(TensorHubError):
                self._session.tell(message, question.life)


def _cuts(question: _Question) -> Cuts:
    assert question.cuts is not None
    return question.cuts


def _range(question: _Question) -> tuple[int, int]:
    segments = _cuts(question).segment
    return int(segments.min(initial=0)), int(segments.max(initial=0))
