"""Ask sources for the checksums of the cuts that a running read takes of them; what was heard stays for the round."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import numpy as np
import xxhash
from numpy.typing import NDArray

from tensorhub_core.client.questions import CutBatch, Questions, batches_of
from tensorhub_core.client.reading import ReadHandle, SourceAccess
from tensorhub_core.errors import StateError, TensorHubError
from tensorhub_core.layout.cuts import Cuts, pack_cuts
from tensorhub_core.layout.read_plan import ReadPlan
from tensorhub_core.state.messages import AskSums, Failure, Reply, Request, Source, SumsGiven

Refused = Callable[[str, str, str], None]
"""Called with a lease as the read knows it, the refusal (`unable`, `corrupt`), and why; any thread."""


class Submit(Protocol):
    """Send a request of a life of the session; `answer` hears its reply on the session's thread."""

    def __call__(self, message: Request, answer: Callable[[Reply], None], *, life: int | None = None) -> int: ...


class Asker:
    """What one round asks. `turn` belongs to the round's thread, answers come on the session's."""

    def __init__(self, submit: Submit, round_number: int, patience_s: float, refused: Refused) -> None:
        self._submit, self._round, self._patience_s, self._refused = submit, round_number, patience_s, refused
        self._lock = threading.Lock()
        self._known: dict[bytes, NDArray[np.uint64]] = {}
        """By manifest and cuts, of all sources that were read in this round."""
        self._questions: Questions | None = None
        self._handle: ReadHandle | None = None
        self._leases: list[str] = []
        self._cuts: list[Cuts] = []
        self._manifests: list[bytes] = []
        self._current: Mapping[str, str] = {}
        self._life = 0
        self._next_number = 0

    def begin(
        self,
        plan: ReadPlan,
        accesses: Sequence[SourceAccess],
        sources: Mapping[str, Source],
        verified: NDArray[np.bool_] | None,
        handle: ReadHandle,
    ) -> None:
        """Tell a read job that has just begun what is known already, and ask for the rest from the next `turn` on.

        `sources` by the leases of the accesses.
        """
        if plan.raw or not len(plan.cuts):
            return
        cuts = [plan.cuts_of(number) for number in range(len(accesses))]
        missing: list[list[CutBatch]] = []
        with self._lock:
            self._leases, self._cuts = [access.lease for access in accesses], cuts
            self._manifests = [_manifest_of(sources.get(lease)) for lease in self._leases]
            for number, mine in enumerate(cuts):
                reads = np.flatnonzero((plan.source == number) & (plan.cut >= 0))
                missing.append([])
                for batch in batches_of(number, mine):
                    which = reads[batch.first : batch.first + batch.count]
                    if verified is not None and verified[which].all():
                        continue
                    known = self._known.get(self._key(batch))
                    if known is None:
                        missing[-1].append(batch)
                    else:
                        handle.know(self._leases[number], batch.first, known)
            self._questions = Questions(missing, self._patience_s, time.monotonic(), self._next_number)
            self._handle = handle

    def turn(self, current: Mapping[str, str], life: int) -> None:
        """Ask what is to be asked now; `current` names the leases of today by those that the read knows."""
        with self._lock:
            if self._questions is None:
                return
            self._current = current
            if life != self._life:
                self._life = life
                self._questions.ask_again(time.monotonic())
            overdue = self._questions.overdue(time.monotonic())
        if overdue is not None:
            text = f"it has not said for {overdue[1]:.1f} s what parts of its segments sum to"
            self._refused(self._leases[overdue[0]], "unable", text)
        self._ask()

    def end(self) -> None:
        """Ask nothing any more: the read has ended. Answers that are on their way are kept for the next one."""
        with self._lock:
            if self._questions is not None:
                self._next_number = self._questions.next_number
            self._questions = self._handle = None

    def close(self) -> None:
        """Let go of the round, so that its memory goes when it is dropped and not with some later collection."""
        self.end()
        self._refused = lambda lease, kind, detail: None

    def _ask(self) -> None:
        """Send what is due; any thread."""
        with self._lock:
            asked = [] if self._questions is None else self._questions.next(time.monotonic())
            messages = [(number, batch, self._message(batch), self._key(batch)) for number, batch in asked]
            life = self._life
        for number, batch, message, key in messages:
            with contextlib.suppress(TensorHubError):  # the session is over: the round hears of it
                self._submit(message, self._hearing(number, batch.count, key), life=life)

    def _message(self, batch: CutBatch) -> AskSums:
        lease = self._leases[batch.source]
        return AskSums(self._round, self._current.get(lease, lease), pack_cuts(self._of(batch)))

    def _of(self, batch: CutBatch) -> Cuts:
        return self._cuts[batch.source].take(slice(batch.first, batch.first + batch.count))

    def _key(self, batch: CutBatch) -> bytes:
        return self._manifests[batch.source] + xxhash.xxh3_128_digest(pack_cuts(self._of(batch)))

    def _hearing(self, number: int, count: int, key: bytes) -> Callable[[Reply], None]:
        return lambda reply: self._heard(number, count, key, reply)

    def _heard(self, number: int, count: int, key: bytes, reply: Reply) -> None:
        """Take an answer; on the session's thread."""
        kind, detail, sums = _meaning(reply, count)
        with self._lock:
            questions, handle = self._questions, self._handle
            if sums is not None:
                self._known[key] = sums
            if questions is None or handle is None:
                return
            lease = ""
            if sums is not None:
                batch = questions.given(number, time.monotonic())
                if batch is not None:
                    handle.know(self._leases[batch.source], batch.first, sums)
            elif kind == "wait":
                questions.put_off(number, time.monotonic())
            else:
                source = questions.give_up(number)
                lease = "" if source is None else self._leases[source]
        if lease:
            self._refused(lease, kind, detail)
        self._ask()


def _manifest_of(source: Source | None) -> bytes:
    return b"" if source is None else source.layout + source.sums


def _meaning(reply: Reply, count: int) -> tuple[str, str, NDArray[np.uint64] | None]:
    """Return what an answer says: checksums, or the refusal and why."""
    if isinstance(reply, Failure):
        return "wait" if reply.code == StateError.code else "unable", reply.message, None
    if not isinstance(reply, SumsGiven):
        return "unable", f"the server answered with {type(reply).__name__}", None
    if reply.refusal:
        return reply.refusal, reply.detail, None
    if len(reply.sums) != 8 * count:
        return "unable", f"it gave {len(reply.sums):,} bytes for {count:,} checksums", None
    return "", "", np.frombuffer(reply.sums, "<u8").astype(np.uint64)
