"""Run a worker's rounds, one at a time, and note how they end: what the memory holds, what has to be taken back."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable
from dataclasses import dataclass

from tensorhub_core.client.access import SourceBook
from tensorhub_core.client.drain import Drain, error_of
from tensorhub_core.client.driver import RoundDriver
from tensorhub_core.client.exactness import Exactness
from tensorhub_core.client.holding import Holding
from tensorhub_core.client.installing import CopyList, InstallDriver
from tensorhub_core.client.mailbox import Mailbox
from tensorhub_core.client.memory import FilledMemory, RegisteredMemory
from tensorhub_core.client.progress import CheckCallback, ProgressCallback
from tensorhub_core.client.reading import Executor
from tensorhub_core.client.resources import Resources
from tensorhub_core.client.round_parts import RoundParts
from tensorhub_core.client.rounds import End, Mode, RoundState
from tensorhub_core.client.staged_memory import StagedMemory
from tensorhub_core.client.versions import Version
from tensorhub_core.clock import Deadline
from tensorhub_core.config import ClientConfig
from tensorhub_core.errors import DeadlineExceeded, ServerUnreachable, StateError, TensorHubError
from tensorhub_core.ids import VersionKey
from tensorhub_core.state.messages import Ended, PutBlob

_WELCOME_S = 1.0

MakeDriver = Callable[[RoundState, RoundParts, int, Deadline, ProgressCallback | None], RoundDriver]
WithdrawCopy = Callable[[Callable[[BaseException | None], None]], None]
"""Take a copy back and call what is given with the error, or None, at its end."""


@dataclass(frozen=True, slots=True)
class Call:
    """What a caller asks of one round; `want` None is `latest`."""

    mode: Mode
    want: int | None
    deadline: Deadline
    progress: ProgressCallback | None = None
    offer: bool = True
    check: CheckCallback | None = None


@dataclass(frozen=True, slots=True)
class StagedVersion:
    """What a stage round has brought: `sums` None if the registered memory holds the version already.

    `converted`: it was converted from other dtypes.
    """

    key: VersionKey
    sums: PutBlob | None
    converted: bool = False


class RoundRunner:
    """The rounds of one worker; calls come from one thread at a time, which holds the worker's lock."""

    def __init__(self, resources: Resources, mailbox: Mailbox, holding: Holding, config: ClientConfig) -> None:
        self._resources, self._session, self._mailbox = resources, resources.session, mailbox
        self._holding, self._exactness = holding, Exactness.of(config)
        self._prefix = config.verify == "always"
        """Others may read what is verified before all is."""
        self._next_round = (0, 0)
        self._miscounted = False
        """The last call ended before it was promised anything: the other shards may be a round ahead of this one."""
        self.drain = Drain(self._session.submit, resources.withdrawn)
        self.lost = False
        """A read could not be stopped: bytes may land in the memory, the session is over."""

    def fill(self, call: Call, memory: RegisteredMemory, book: SourceBook) -> Version:
        """Fill the registered memory from peers; returns the version or raises the round's error."""
        parts = self._parts(call, memory, book, self._resources.executor, self._withdraw)
        have = None if self._holding.dirty else self._holding.held
        return self._conclude(*self._run(call, have, self._offered, parts, RoundDriver))

    def install(
        self, call: Call, memory: RegisteredMemory, book: SourceBook, copies: CopyList, what: StagedVersion
    ) -> Version:
        """Copy what is staged into the registered memory, once all shards have it; returns or raises like `fill`."""
        assert what.sums is not None
        parts = self._parts(call, memory, book, self._resources.executor, self._withdraw)
        make = functools.partial(InstallDriver, copies=copies, staged_sums=what.sums, converted=what.converted)
        return self._conclude(*self._run(call, what.key, self._offered, parts, make))

    def stage(
        self, call: Call, staged: StagedMemory, book: SourceBook, executor: Executor, withdraw: WithdrawCopy
    ) -> StagedVersion:
        """Fill the staging memory from peers; what the registered memory holds stays as it is, whatever happens."""
        parts = self._parts(call, staged, book, executor, withdraw)
        have = None if self._holding.dirty else self._holding.held
        driver, end = self._run(call, have, False, parts, RoundDriver)
        if end.error is not None:
            raise self._error_of(driver, end)
        assert end.key is not None
        self._mailbox.counters.commits += int(not end.held)
        return StagedVersion(end.key, None if end.held else driver.sums, driver.state.converted)

    def pass_through(
        self, call: Call, passing: FilledMemory, book: SourceBook, have: VersionKey | None, make: MakeDriver
    ) -> StagedVersion:
        """Have a version pass through bounded memory; whoever uses it has the version `have` already."""
        parts = self._parts(call, passing, book, self._resources.executor, self._withdraw)
        driver, end = self._run(call, have, False, parts, make)
        if end.error is not None:
            raise self._error_of(driver, end)
        assert end.key is not None
        self._mailbox.counters.commits += int(not end.held)
        return StagedVersion(end.key, None if end.held else driver.sums)

    @property
    def _offered(self) -> bool:
        return self._holding.published or self._holding.draining

    def _parts(
        self, call: Call, memory: FilledMemory, book: SourceBook, executor: Executor, withdraw: WithdrawCopy
    ) -> RoundParts:
        counters, exactness = self._mailbox.counters, self._exactness
        return RoundParts(self._session, memory, book, executor, withdraw, counters, call.check, exactness)

    def _run(
        self,
        call: Call,
        have: VersionKey | None,
        offered: bool,
        parts: RoundParts,
        make: MakeDriver,
    ) -> tuple[RoundDriver, End]:
        if self._miscounted:
            self._count_anew(call.deadline)
        welcome, life = self._mailbox.newest()
        number = self._next_round[1] if self._next_round[0] == life else welcome.next_round
        state = RoundState(number, call.want, call.mode, have, call.offer, call.deadline.at_s, offered)
        state.prefix, state.room_bytes = self._prefix, self._resources.offloads.room_bytes()
        driver = make(state, parts, life, call.deadline, call.progress)
        self._mailbox.attach(driver)
        end: End | None = None
        try:
            end = driver.run()
        finally:
            self._mailbox.detach()
            self._next_round = (driver.life, state.number + 1)
            self._session.ended = Ended(state.number, None if end is None or end.error is not None else end.key)
        self._mailbox.counters.discards += state.discards
        return driver, end

    def _count_anew(self, deadline: Deadline) -> None:
        """Ask the server which round the other shards are in, or will be.

        A shard that made fewer calls than the others, because one failed before it reached the server, would hear for
        ever how the round before ended, while they wait for it in the next one.
        """
        life = self._mailbox.newest()[1]
        self._miscounted = False
        self._session.say_hello_again()
        self._mailbox.wait_for_welcome(life, deadline.left_s(time.monotonic(), _WELCOME_S))

    def _withdraw(self, done: Callable[[BaseException | None], None]) -> None:
        future, begun = self.drain.begin()
        self._mailbox.counters.drains += int(begun)
        self._holding.now_draining()
        future.add_done_callback(lambda reply: self._withdraw_ended(error_of(reply.result()), done))

    def _withdraw_ended(self, error: TensorHubError | None, done: Callable[[BaseException | None], None]) -> None:
        if error is not None:
            self._holding.now_refused()
        done(error)

    def _conclude(self, driver: RoundDriver, end: End) -> Version:
        """Note how a round of the registered memory ended; return the version or raise its error."""
        holding = self._holding
        if not driver.state.published and self._offered:
            holding.now_withdrawn(keep=True)
        if end.error is None:
            assert end.key is not None
            if end.held and holding.held != end.key:
                raise StateError(f"the server takes the memory for version {end.key[1]}: call unpublish(), then again")
            if not end.held:
                converted = driver.state.converted
                holding.now_committed(end.key, end.published, converted)
                self._mailbox.counters.commits += 1
                holding.digest = None if driver.sums is None else driver.sums.digest
                if end.published and driver.sums is not None:
                    self._resources.stand(end.key, driver.sums, driver.life, converted)
            return Version.of(end.key)
        if end.dirty:
            holding.now_spoiled()
        if end.uncertain:
            key, sums = driver.state.key, driver.sums
            self.take_back_uncertain(None if key is None or sums is None else (key[1], sums))
        raise self._error_of(driver, end)

    def _error_of(self, driver: RoundDriver, end: End) -> BaseException:
        """Return the error that a round ends with; a session that is no good any more is ended."""
        error = end.error
        assert error is not None
        self._mailbox.counters.aborted_rounds += 1
        if end.unquiet:
            self.lost = True
            self._session.close()
        unheard = driver.life != self._mailbox.newest()[1]
        self._miscounted = driver.state.key is None or driver.state.rejoins > 0 or unheard
        silent = not self._session.answers()
        if unheard:  # the word that the round is left may have gone with an earlier connection
            self._session.say_hello_again()
        if isinstance(error, DeadlineExceeded) and silent:
            unreachable = ServerUnreachable(f"{error}; {self._session.address} is silent")
            unreachable.__cause__ = error
            return unreachable
        return error

    def take_back_uncertain(self, what: tuple[int, PutBlob] | None) -> None:
        """Take back what the server may take for published, and let nobody read it meanwhile.

        `what` is its number and checksums: the server may ask for an offload copy of it.
        """
        self._resources.uncertain = what
        self._holding.published = True
        self._holding.now_draining()
        with contextlib.suppress(TensorHubError):
            self.drain.begin()
        self._resources.hide()
