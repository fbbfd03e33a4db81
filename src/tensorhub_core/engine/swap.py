"""The swap transaction of an engine: from one whole version to another one, or not at all (DESIGN.md section 8).

The transaction is a generator of steps: it decides, the engine's adapter acts. The driver performs each step and sends
the result back, or throws what the step raised. So the same transaction serves synchronous and asynchronous engines,
and every order of failures can be tested without one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from tensorhub_core.engine.steps import (
    Discard,
    EngineStatus,
    Install,
    Look,
    Pause,
    Process,
    Publish,
    ResetCaches,
    Resume,
    SetVersion,
    ShardReport,
    Stage,
    State,
    Steps,
    SwapMode,
    SwapOutcome,
    SwapTimes,
    Update,
    Withdraw,
)
from tensorhub_core.errors import ERRORS, StateError, TensorHubError


@dataclass
class Swapper:
    """Hold an engine's status and decide its swaps. One swap at a time; the driver's thread or task.

    `now` returns monotonic seconds. `staged`: while the engine serves, a version is fetched into host memory first, so
    that the engine stands still only for a local copy and the processing.
    """

    status: EngineStatus
    now: Callable[[], float]
    staged: bool = False
    _paused: bool = field(default=False, init=False)
    _staging: bool = field(default=False, init=False)

    def started(self, reports: Sequence[ShardReport]) -> None:
        """Take over what the engine loaded at its start; raises StateError if its ranks do not agree."""
        versions = {(report.epoch, report.version, report.served, report.ok) for report in reports}
        first = reports[0]
        if len(versions) != 1 or not first.ok or first.served is None:
            raise StateError(f"the ranks of the engine did not start with one version: {_described(reports)}")
        self.status = replace(
            self.status, state="serving", version=first.served, epoch=first.epoch, shards=tuple(reports), error=None
        )

    def release(self) -> Steps[None]:
        """Stop the engine and take every rank's copy back, so that its memory may go; a further swap fills it again.

        Without an error code in the status after it, no rank holds anything; with one, the memory has to stay.
        """
        reports: Sequence[ShardReport] = ()
        try:
            if not self._paused:
                yield Pause("abort")
        except Exception as error:
            yield from self._give_up_pause(error)
            return
        self._paused = True
        try:
            reports = yield Withdraw()
            failed = [report for report in reports if not report.ok]
            problem = _cause(failed) if failed or not reports else ("", "the engine's memory is released")
        except Exception as error:
            problem = _named(error)
        code, message = problem
        self._set(state="paused", version=None, error=message, code=code, shards=tuple(reports))

    def swap(self, version: int | Literal["latest"], mode: SwapMode) -> Steps[SwapOutcome]:
        """Bring every rank to a version; yields the steps, returns the outcome, never raises for what a step did.

        While the engine is paused after a failure, a further swap goes on from there. Raises StateError if a swap runs.
        """
        if self.status.state == "swapping" or self._staging:
            raise StateError("a swap is running: wait for its end")
        before = self.status
        try:
            found = yield Look(version)
        except Exception as error:
            return self._not_begun(error)
        if before.state == "serving" and found == (before.epoch, before.version):
            return self._unchanged()
        if self.staged and before.state == "serving":
            return (yield from self._swap_staged(version, mode))
        return (yield from self._exchange(Update(version), version, mode, None))

    def _swap_staged(self, version: int | Literal["latest"], mode: SwapMode) -> Steps[SwapOutcome]:
        """Fetch a version while the old one serves, then exchange them; a version that cannot be had stops nothing."""
        before, began = self.status, self.now()
        self._staging = True
        try:
            reports = yield Stage(version)
            problem = _unstaged(reports, version)
        except Exception as error:
            problem = _named(error)
        finally:
            self._staging = False
        if problem is not None:
            yield from self._discard()
            code, message = problem
            self._set(error=message, code=code)
            return SwapOutcome(before.version, False, code, message)
        target = reports[0].staged
        assert target is not None
        if target == (before.epoch, before.version):
            yield from self._discard()
            return self._unchanged()
        outcome = yield from self._exchange(Install(), target[1], mode, self.now() - began)
        if not outcome.ok:
            yield from self._discard()
        return outcome

    def _exchange(
        self, fill: Update | Install, version: int | Literal["latest"], mode: SwapMode, stage_s: float | None
    ) -> Steps[SwapOutcome]:
        """Stop the engine, let `fill` bring the version into every rank's memory, and serve it."""
        before = self.status
        self._set(state="swapping")
        began = self.now()
        try:
            if not self._paused:
                yield Pause(mode)
        except Exception as error:
            return (yield from self._give_up_pause(error))
        self._paused = True
        drained = self.now()
        try:
            reports = yield fill
        except Exception as error:
            return self._stay_paused("failed", error, ())
        transferred = self.now()
        self._set(shards=tuple(reports))
        if (problem := _disagreement(reports, version)) is not None:
            return (yield from self._refused(problem, reports, before.version))
        return (yield from self._commit(mode, tuple(reports), (began, drained, transferred), stage_s))

    def _unchanged(self) -> SwapOutcome:
        """End a swap to the version that is served already."""
        self._set(error=None, code="")
        return SwapOutcome(self.status.version, False)

    def _discard(self) -> Steps[None]:
        """Have the ranks drop what they staged; one that does not hear of it drops it at its next stage."""
        with contextlib.suppress(Exception):
            yield Discard()

    def _commit(
        self,
        mode: SwapMode,
        reports: tuple[ShardReport, ...],
        times: tuple[float, float, float],
        stage_s: float | None,
    ) -> Steps[SwapOutcome]:
        """Serve what every rank now holds."""
        target = reports[0].version
        assert target is not None
        stale = any(report.served != target for report in reports)
        changed = stale or (self.status.epoch, self.status.version) != (reports[0].epoch, target)
        try:
            if stale:
                reports = tuple((yield Process()))
                self._set(shards=reports)
                _require(reports, target, "post-load processing")
            processed = self.now()
            if changed and not (yield ResetCaches()):
                raise StateError("the prefix cache was not reset: cached blocks of old weights would be served")
            note = yield from self._offer(reports)
            yield SetVersion(target)
            yield from self._resume()
        except Exception as error:
            return self._stay_paused("failed", error, self.status.shards)
        last = self.status.last_swap
        if changed:
            began, drained, transferred = times
            parts = (drained - began, transferred - drained, processed - transferred, self.now() - began)
            last = SwapTimes(mode, *parts, stage_s)
        self._set(state="serving", version=target, epoch=reports[0].epoch, error=note, code="", last_swap=last)
        return SwapOutcome(target, changed)

    def _offer(self, reports: tuple[ShardReport, ...]) -> Steps[str | None]:
        """Publish what is not offered yet. The weights are right even if that fails: return the reason to show."""
        if all(report.published for report in reports):
            return None
        reports = tuple((yield Publish()))
        self._set(shards=reports)
        failed = [report for report in reports if not report.ok]
        return f"served, but not offered to others: {_described(failed)}" if failed else None

    def _give_up_pause(self, error: Exception) -> Steps[SwapOutcome]:
        """Undo a pause that failed: nothing was touched."""
        code, message = _named(error)
        message = f"the engine could not be paused: {message}"
        if self.status.version is None:
            return self._stay_paused("failed", _error(code, message), self.status.shards)
        try:
            yield from self._resume()
        except Exception as second:
            return self._stay_paused("failed", second, self.status.shards)
        self._set(state="serving", error=message, code=code)
        return SwapOutcome(self.status.version, False, code, message)

    def _resume(self) -> Steps[None]:
        """Resume generation. If the answer is lost the engine may run: the next swap has to pause it again."""
        self._paused = False
        yield Resume()

    def _not_begun(self, error: Exception) -> SwapOutcome:
        """End a swap for which there is nothing to be had: the engine goes on as it was."""
        code, message = _named(error)
        if self.status.state != "serving":
            self._set(error=message, code=code)
        return SwapOutcome(self.status.version, False, code, message)

    def _refused(
        self, problem: tuple[str, str], reports: Sequence[ShardReport], before: int | None
    ) -> Steps[SwapOutcome]:
        """End a swap whose update did not reach every rank: nobody processes, nobody publishes.

        If every rank still holds and computes with one whole version, the engine goes back to serving it.
        """
        code, message = problem
        held = {(report.epoch, report.version, report.served) for report in reports}
        epoch, version, served = next(iter(held), (0, None, None))
        if len(held) != 1 or version is None or version != served:
            return self._stay_paused("paused", _error(code, message), reports)
        try:
            if version != before:
                if not (yield ResetCaches()):
                    raise StateError("the prefix cache was not reset: cached blocks of old weights would be served")
                yield SetVersion(version)
            yield from self._resume()
        except Exception as error:
            return self._stay_paused("failed", error, reports)
        self._set(state="serving", version=version, epoch=epoch, error=message, code=code)
        return SwapOutcome(version, False, code, message)

    def _stay_paused(self, state: State, error: Exception, reports: Sequence[ShardReport]) -> SwapOutcome:
        """Serve nothing until a further swap succeeds."""
        code, message = _named(error)
        self._set(state=state, version=None, error=message, code=code, shards=tuple(reports))
        return SwapOutcome(None, False, code, message)

    def _set(self, **changes: Any) -> None:
        self.status = replace(self.status, **changes)


def _unstaged(reports: Sequence[ShardReport], wanted: int | Literal["latest"]) -> tuple[str, str] | None:
    """Return (code, message) unless every rank has staged one and the same version, the wanted one."""
    if not reports:
        return "state_error", "no rank of the engine answered"
    failed = [report for report in reports if not report.ok]
    if failed:
        return _cause(failed)
    found = {report.staged for report in reports}
    first = reports[0].staged
    if len(found) != 1 or first is None or wanted not in ("latest", first[1]):
        return "state_error", f"version {wanted} was to be staged, the ranks have {sorted(found, key=str)}"
    return None


def _disagreement(reports: Sequence[ShardReport], wanted: int | Literal["latest"]) -> tuple[str, str] | None:
    """Return (code, message) unless every rank holds the wanted version whole and proves it."""
    if not reports:
        return "state_error", "no rank of the engine answered"
    failed = [report for report in reports if not report.ok]
    if failed:
        return _cause(failed)
    if len({(report.epoch, report.version) for report in reports}) != 1 or reports[0].version is None:
        return "state_error", f"the ranks hold different versions: {_described(reports)}"
    if wanted not in ("latest", reports[0].version):
        return "state_error", f"version {wanted} was asked for: {_described(reports)}"
    unproven = [report for report in reports if not report.digest]
    if unproven:
        return "state_error", f"no digest proves what these ranks hold: {_described(unproven)}"
    return None


def _cause(failed: Sequence[ShardReport]) -> tuple[str, str]:
    """Return (code, message) of failed ranks: one that was told of the abort knows less than the one that caused it."""
    if not failed:
        return "state_error", "no rank of the engine answered"
    cause = max(failed, key=lambda report: (_SEVERITY.get(report.code, 0), -report.shard))
    return cause.code or "error", _described(failed)


_SEVERITY = {
    "corrupt_transfer": 4,
    "layout_mismatch": 3,
    "registration_error": 3,
    "version_conflict": 2,
    "state_error": 1,
}


def _require(reports: Sequence[ShardReport], target: int, what: str) -> None:
    wrong = [report for report in reports if not report.ok or report.served != target or report.version != target]
    if wrong or not reports:
        raise StateError(f"{what} did not bring every rank to version {target}: {_described(wrong)}")


def _described(reports: Sequence[ShardReport]) -> str:
    """Say it once if all ranks say the same."""
    texts: dict[str, list[int]] = {}
    for report in reports:
        held = "dirty memory" if report.version is None else f"version {report.version}"
        texts.setdefault(report.message or f"holds {held}, serves {report.served}", []).append(report.shard)
    return "; ".join(f"shard {', '.join(map(str, shards))}: {text}" for text, shards in texts.items())


def _named(error: Exception) -> tuple[str, str]:
    code = error.code if isinstance(error, TensorHubError) else "error"
    return code, str(error) or type(error).__name__


def _error(code: str, message: str) -> TensorHubError:
    return ERRORS.get(code, TensorHubError)(message)
