"""Keep the ranks of one trainer together: what fails on one of them fails on all, before any of them goes on."""

from __future__ import annotations

import threading
import time
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Protocol

from tensorhub_core.errors import ConfigError, StateError, TensorHubError, error_from_wire

if TYPE_CHECKING:
    import torch

_TEXT_BYTES = 2048
_LATE_S = 1800.0
"""How late ranks may come where the job does not say: as long as torch waits for them by default."""
_ROLL_CALL_S = 3.0
"""How long ranks that have lost others wait for each other to say so."""
_STORE_S = 3.0
"""How much longer the job's store may take to answer."""
_MARKS = 60
"""Ranks that say so in one number of the job's store."""


class Agreement(Protocol):
    """What the ranks of a trainer settle together. Every method that says so is called by all of them."""

    @property
    def rank(self) -> int:
        """Number of this rank: the shard that it publishes."""

    @property
    def size(self) -> int:
        """How many ranks there are: the number of shards."""

    def settle(self, what: str, error: Exception | None, value: int, step: int = 0) -> None:
        """Return when all ranks have got here without an error, with the same value and step; called by all ranks.

        Raises this rank's own error, else that of the first rank that has one, else StateError if values or the steps
        that were begun differ, or naming the ranks that are gone or do not come.
        """

    def highest(self, value: int) -> int:
        """Return the highest value of any rank; called by all ranks. Raises StateError as `settle` does."""

    def close(self) -> None:
        """Give back what the agreement holds; for this rank alone."""


class Alone:
    """The agreement of a trainer of one process."""

    rank = 0
    size = 1

    def settle(self, what: str, error: Exception | None, value: int, step: int = 0) -> None:
        """Raise the error, if there is one."""
        if error is not None:
            raise error

    def highest(self, value: int) -> int:
        """Return the value."""
        return value

    def close(self) -> None:
        """Nothing is held."""


class RanksAgree:
    """The agreement of a `torch.distributed` group: through it, or for all ranks through a gloo group of their own.

    torch can make a group of some ranks only together with all others, or under a name that ranks in different numbers
    of groups would not agree on; so a group that is given is used itself.
    """

    def __init__(self, group: Any, timeout_s: float) -> None:
        """Make what is needed; called by all ranks of `group` (None: all there are). Waits for others are bounded.

        By `timeout_s` and how late ranks may come in this job, or by what the group was made with.
        """
        import torch.distributed as dist

        self._is_own = group is None
        if self._is_own:
            # No device waits for it.
            group = dist.new_group(timeout=timedelta(seconds=timeout_s + late_s()), backend="gloo")
        self._group = group
        self._name: str = group.group_name
        self._device = "cpu" if "cpu:" in dist.get_backend_config(group) else "cuda"
        self.rank: int = dist.get_rank(group)
        self.size: int = dist.get_world_size(group)
        self._calls = 0

    def settle(self, what: str, error: Exception | None, value: int, step: int = 0) -> None:
        """Exchange outcomes, and raise the same on all ranks."""
        try:
            failed, highest, lowest, last, first = self._highest(int(error is not None), value, -value, step, -step)
            texts = self._texts(error) if failed else []
        except RuntimeError as lost:  # such as a time-out, or a rank that has ended
            raise error or self._lost(what, lost) from lost
        if error is not None:
            raise error
        for rank, (code, text) in enumerate(texts):
            if code:
                raise error_from_wire(code, f"{what} failed on rank {rank} of the trainer: {text}")
        if last != -first:
            raise StateError(
                f"{what}: the trainer's ranks are not at the same step: some have begun {-first}, others {last}, as "
                "when a step raises on some of them alone; load a checkpoint and attach again"
            )
        if highest != -lowest:
            raise StateError(
                f"{what}: the trainer's ranks do not agree: {-lowest} on some, {highest} on others; load a checkpoint "
                "and attach again"
            )

    def highest(self, value: int) -> int:
        """Exchange the values."""
        try:
            return self._highest(value)[0]
        except RuntimeError as lost:
            raise self._lost("comparing ranks", lost) from lost

    def close(self) -> None:
        """Destroy the group, if it is our own and the process still has it."""
        import torch.distributed as dist

        if self._is_own and self._group is not None and dist.is_initialized():
            dist.destroy_process_group(self._group)
        self._group = None

    def _highest(self, *values: int) -> list[int]:
        import torch
        import torch.distributed as dist

        self._calls += 1
        found = torch.tensor(values, dtype=torch.int64, device=self._device)
        dist.all_reduce(found, op=dist.ReduceOp.MAX, group=self._group)
        return [int(value) for value in found]

    def _texts(self, error: Exception | None) -> list[tuple[str, str]]:
        """Return (code, text) of every rank's error, both empty where it has none."""
        import torch
        import torch.distributed as dist

        mine = _packed(error).to(self._device)
        found = [torch.empty_like(mine) for _ in range(self.size)]
        dist.all_gather(found, mine, group=self._group)
        return [_unpacked(row) for row in found]

    def _lost(self, what: str, error: RuntimeError) -> StateError:
        """Return the error of a call that other ranks did not come to, or did not stay in, naming them."""
        absent: list[list[int]] = []
        # Who keeps the store may be who is missing: then it does not answer.
        asking = threading.Thread(target=lambda: absent.append(self._absent()), name="tensorhub-roll-call", daemon=True)
        asking.start()
        asking.join(_ROLL_CALL_S + _STORE_S)
        if not absent:
            lost = "other ranks of the trainer, with whoever keeps the job's store (rank 0, or its launcher), are gone"
        elif len(absent[0]) == 1:
            lost = f"rank {absent[0][0]} of the trainer is gone or does not come"
        elif absent[0]:
            lost = f"ranks {', '.join(map(str, absent[0]))} of the trainer are gone or do not come"
        else:
            lost = "the connections between the ranks of the trainer are lost"
        return StateError(f"{what}: {lost}: restart the job ({error})")

    def _absent(self) -> list[int]:
        """Return the ranks that do not say within a moment that they have lost others in the same call.

        Once a rank gives up, its connections close, so that all that wait for others hear of it at once.
        """
        from torch.distributed.distributed_c10d import _get_default_store

        store = _get_default_store()
        names = [f"tensorhub/{self._name}/{self._calls}/{first}" for first in range(0, self.size, _MARKS)]
        store.add(names[self.rank // _MARKS], 1 << self.rank % _MARKS)
        deadline = time.monotonic() + _ROLL_CALL_S
        while True:
            marks = [store.add(name, 0) for name in names]
            absent = [rank for rank in range(self.size) if not marks[rank // _MARKS] >> rank % _MARKS & 1]
            if not absent or time.monotonic() >= deadline:
                return absent
            time.sleep(0.05)


def late_s() -> float:
    """Return how long the job lets its ranks wait for each other: the `timeout` of `init_process_group()`."""
    import torch
    import torch.distributed as dist

    found = [_LATE_S]
    for device in ("cpu", "cuda"):
        try:
            options = dist.group.WORLD._get_backend(torch.device(device)).options  # type: ignore[union-attr]
            found.append(options._timeout.total_seconds())
        except (AttributeError, RuntimeError):
            continue  # no such backend, or one that does not say
    return found[0] if len(found) == 1 else min(found[1:])


def agreement_of(group: Any, timeout_s: float) -> Agreement:
    """Return the agreement of the ranks of `group` (None: of the whole job); called by all of them.

    Without `torch.distributed`, or with one rank, that is one process alone. Raises ConfigError for a group that does
    not have this rank.
    """
    import torch.distributed as dist

    if not (dist.is_available() and dist.is_initialized()):
        return Alone()
    if dist.get_rank(group) < 0:
        raise ConfigError("this rank is not in `group`: attach on the group's ranks only")
    if dist.get_world_size(group) == 1:
        return Alone()
    return RanksAgree(group, timeout_s)


def _packed(error: Exception | None) -> torch.Tensor:
    """Write an error's code and text into u8 [2048]; all zero for none."""
    import torch

    row = torch.zeros(_TEXT_BYTES, dtype=torch.uint8)
    if error is not None:
        code = error.code if isinstance(error, TensorHubError) else TensorHubError.code
        text = str(error) if isinstance(error, TensorHubError) else f"{type(error).__name__}: {error}"
        data = f"{code}\n{text}".encode(errors="replace")[: _TEXT_BYTES - 1]
        row[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    return row


def _unpacked(row: torch.Tensor) -> tuple[str, str]:
    data = bytes(row.tolist()).rstrip(b"\0")
    code, _, text = data.decode(errors="ignore").partition("\n")
    return code, text
