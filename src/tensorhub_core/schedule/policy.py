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
    lag_bytes: int = 0
    """How far a reader runs behind the copy that it follows; a hop costs this share of a copy's time. What is under way
    and not verified yet goes with the rate of the link: 1 MB at 200 Mbit/s, 8 to 19 MB at 4 GB/s (FACTS.md section 5),
    600 MB at 22 GB/s. The server knows no rate before it has seen one, so `auto` takes a hop for free: a chain spares
    the publisher whatever the size."""
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
        return min(1.0, self.lag_bytes / total_bytes) if total_bytes > 0 else min(1.0, self.lag_bytes)


POLICIES: Mapping[str, Policy] = MappingProxyType(
    {
        "auto": Policy(name="auto"),
        "tree": Policy(name="tree", lag_bytes=16 << 20),
        "star": Policy(name="star", follows=False, one_seed=False),
        "chain": Policy(name="chain", one_seed=False),
    }
)
AUTO = POLICIES["auto"]


def policy_of(name: str) -> Policy:
    """Return a policy by its name; raises ConfigError naming those there are."""
    found = POLICIES.get(name)
    if found is None:
        raise ConfigError(f"policy must be one of {', '.join(sorted(POLICIES))}, not {name!r}")
    return found
