"""Keep account of what a worker's registered memory holds; pure."""

from __future__ import annotations

from dataclasses import dataclass

from tensorhub_core.errors import StateError
from tensorhub_core.ids import VersionKey


@dataclass(slots=True)
class Holding:
    """State of one worker's memory.

    `held`: the version in memory under the commitment not to change it. `published`: it is offered to others.
    `draining`: it is being taken back, readers may still see it. `dirty`: a read was broken off in it. `origin`: the
    version of the last committed round in it, which the worker may publish again as a holder, not as its creator.
    `converted`: `origin` was converted from other
    dtypes. `digest`: of the checksums of `held`. `staged`: the version that waits in staging memory to be installed.
    """

    registered: bool = False
    held: VersionKey | None = None
    published: bool = False
    draining: bool = False
    dirty: bool = False
    origin: VersionKey | None = None
    converted: bool = False
    digest: bytes | None = None
    staged: VersionKey | None = None

    def check_register(self) -> None:
        """Raise StateError if the memory may not be exchanged now."""
        self._check_nothing_staged("register")
        if self.published or self.draining:
            raise StateError(f"version {_number(self.held)} is published: call unpublish() before register()")

    def check_publish(self, number: int, fresh: bool) -> bool:
        """Tell whether there is anything to do; raises StateError if the memory may not be published now."""
        self._check_registered("publish")
        if self.draining:
            raise StateError(f"version {_number(self.held)} is draining: call unpublish() again before publish()")
        if self.published:
            if self.held is not None and self.held[1] == number:
                return False
            raise StateError(f"version {_number(self.held)} is published: call unpublish() before publish({number})")
        if self.dirty and not fresh:
            raise StateError(
                "the memory is dirty: a replicate or update was broken off in it; replicate again, or rewrite every "
                "tensor and say so with publish(version, fresh=True)"
            )
        return True

    def check_replicate(self) -> None:
        """Raise StateError if the memory may not be overwritten now."""
        self._check_registered("replicate")
        if self.draining:
            raise StateError(f"version {_number(self.held)} is draining: call unpublish() again before replicate()")
        if self.published:
            raise StateError(
                f"version {_number(self.held)} is published: call unpublish() before replicate(), or call update()"
            )

    def check_update(self) -> None:
        """Raise StateError if there is no memory to update."""
        self._check_registered("update")

    def check_stage(self) -> None:
        """Raise StateError if nothing can be staged now."""
        self._check_registered("stage")
        self._check_nothing_staged("stage")

    def check_install(self, key: VersionKey, wanted: bool) -> None:
        """Raise StateError if a staged version cannot be installed now; `wanted`: its number was asked for."""
        self._check_registered("install")
        if self.staged != key:
            raise StateError(f"version {_number(key)} is not staged any more: it was installed or discarded")
        if self.held is not None and self.held > key and not wanted:
            raise StateError(
                f"version {_number(key)} was staged as the latest one, but the memory holds {_number(self.held)}: "
                f"discard() it, or call stage({_number(key)}) to go back"
            )

    def _check_nothing_staged(self, what: str) -> None:
        if self.staged is not None:
            raise StateError(f"version {_number(self.staged)} is staged: install() or discard() it before {what}()")

    def _check_registered(self, what: str) -> None:
        if not self.registered:
            raise StateError(f"{what}() needs registered tensors: call register() first")

    def now_registered(self) -> None:
        """Note new memory, whose content is not known; a dirty worker stays dirty until it says otherwise."""
        self.registered, self.held = True, None

    def now_published(self, key: VersionKey) -> None:
        """Note a publish; its creator stays a creator, a holder of a committed round stays a holder."""
        self.held = key
        self.origin = key if self.origin == key else None
        self.published, self.draining, self.dirty = True, False, False

    def now_draining(self) -> None:
        """Note that the copy is being taken back."""
        self.draining = True

    def now_refused(self) -> None:
        """Note that the server has refused to take the copy back: it is offered as before."""
        self.draining = False

    def now_withdrawn(self, *, keep: bool) -> None:
        """Note that nobody sees the copy any more; unless `keep`, the caller may change the memory from now on."""
        self.held = self.held if keep else None
        self.published = self.draining = False

    def now_committed(self, key: VersionKey, published: bool, converted: bool = False) -> None:
        """Note a committed round."""
        self.held = self.origin = key
        self.converted = converted
        self.published, self.draining, self.dirty = published, False, False

    def now_spoiled(self) -> None:
        """Note that a read was broken off."""
        self.held = self.origin = None
        self.published, self.dirty = False, True

    def origin_of(self, number: int, fresh: bool) -> tuple[int | None, bool]:
        """Return the epoch under which a holder publishes `number` again, and whether that was converted.

        None: it creates the version.
        """
        if fresh or self.origin is None or self.origin[1] != number:
            return None, False
        return self.origin[0], self.converted


def _number(key: VersionKey | None) -> str:
    return "?" if key is None else str(key[1])
