"""What readers are spread over sources by: a record of constants, and the few of them that have a name; pure.

The setting `policy` of the server names one. `auto` is for use; the others are what it is compared with.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from tensorhub_core.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """Constants of the cost of a source; `schedule/sources.py` says how they come together."""

    name: str
    follows: bool = True
    """Readers follow copies that still fill. Without it all read from whole copies: a star, N times as long as one."""
    lag_bytes: int = 16 << 20
    """How far a reader runs behind the copy that it follows. Measured with segments of 4 MiB: 8 to 19 MB a hop
    (FACTS.md section 5), as much as is under way and not verified yet. A hop costs this share of a copy's time."""
    beside: float = 1 / 8
    """What a reader of a source on its own machine costs, in readers over the network: it uses no NIC. Not nothing:
    memory is shared too, so that ten neighbours form a tree and not a star."""
    most_sources: int = 3
    """Copies of its own layout that a reader reads at the same time: enough that one may fail or be slow, and few
    enough that there are some left for others."""
    one_seed: bool = True
    """One reader of a zone fetches a version from another zone, and the others wait where they cannot follow it: links
    between zones are slow, dear and shared."""

    def lag(self, total_bytes: int) -> float:
        """Return what a hop costs, in times of one copy: a small one is whole before it can be followed."""
        return min(1.0, self.lag_bytes / total_bytes) if total_bytes > 0 else 1.0


POLICIES: Mapping[str, Policy] = MappingProxyType(
    {
        "auto": Policy(name="auto"),
        "star": Policy(name="star", follows=False, one_seed=False),
        "chain": Policy(name="chain", lag_bytes=0, one_seed=False),
    }
)
AUTO = POLICIES["auto"]


def policy_of(name: str) -> Policy:
    """Return a policy by its name; raises ConfigError naming those there are."""
    found = POLICIES.get(name)
    if found is None:
        raise ConfigError(f"policy must be one of {', '.join(sorted(POLICIES))}, not {name!r}")
    return found
