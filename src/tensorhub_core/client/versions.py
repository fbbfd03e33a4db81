"""What users see of versions."""

from __future__ import annotations

import contextlib
import operator
from dataclasses import dataclass
from typing import SupportsIndex

from tensorhub_core.errors import ConfigError
from tensorhub_core.ids import VersionKey
from tensorhub_core.state.bounds import MOST_COUNT

MAX_NUMBER = MOST_COUNT


class Version(int):
    """A version's number, which also carries the epoch of the stream it belongs to (`epoch`)."""

    epoch: int

    def __new__(cls, number: int, epoch: int) -> Version:
        """Make the version `number` of stream epoch `epoch`."""
        self = super().__new__(cls, number)
        self.epoch = epoch
        return self

    def __repr__(self) -> str:
        return f"Version({int(self)}, epoch={self.epoch})"

    def __str__(self) -> str:
        return int.__repr__(self)

    def __reduce__(self) -> tuple[type[Version], tuple[int, int]]:
        return Version, (int(self), self.epoch)

    @classmethod
    def of(cls, key: VersionKey) -> Version:
        """Make the version of a key."""
        return cls(key[1], key[0])

    @property
    def key(self) -> VersionKey:
        """Return (epoch, number), by which versions are ordered."""
        return (self.epoch, int(self))


@dataclass(frozen=True, slots=True)
class VersionInfo:
    """One version as the reference server knows it.

    `whole`: some replica offers all its shards. `replicas`: who offers it whole. `total_bytes`: of one full copy.
    """

    version: Version
    whole: bool
    retained: bool
    replicas: tuple[str, ...]
    total_bytes: int


def number_of(version: object) -> int:
    """Return the number of a version given by a user; raises ConfigError for what is no version."""
    number = -1
    if isinstance(version, SupportsIndex) and not isinstance(version, bool):
        with contextlib.suppress(TypeError):  # a tensor of floats has __index__ and refuses it
            number = operator.index(version)
    if not 0 <= number <= MAX_NUMBER:
        raise ConfigError(f"a version is a whole number from 0 to {MAX_NUMBER}, not {version!r}")
    return number


def wanted(version: object) -> int | None:
    """Return the number that a user wants, None for `"latest"`; raises ConfigError for what is neither."""
    if version == "latest":
        return None
    if isinstance(version, str):
        raise ConfigError(f'version is "latest" or a whole number, not {version!r}')
    return number_of(version)
