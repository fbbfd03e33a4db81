"""Constants of one life of the reference server's machine."""

from __future__ import annotations

from dataclasses import dataclass

from tensorhub_core.ids import ModelName
from tensorhub_core.schedule.policy import AUTO, Policy


@dataclass(frozen=True, slots=True)
class MachineConfig:
    """Constants of one server life; times in seconds, limits as bounds that fail closed."""

    server_epoch: int
    lease_s: float = 5.0
    heartbeat_s: float = 1.0
    grace_s: float = 5.0
    dead_after_s: float = 15.0
    join_timeout_s: float = 60.0
    max_workers: int = 20_000
    max_models: int = 1_000
    max_streams: int = 256
    """Streams of one model that are remembered, so that those which are over stay over."""
    max_shards: int = 65_536
    max_name_bytes: int = 1_024
    max_blob_bytes: int = 1 << 30
    max_deferred: int = 64
    max_tickets: int = 65_536
    max_tickets_of_worker: int = 1_024
    max_tickets_of_lease: int = 8
    """Questions for checksums of cuts that are open: in all, to one worker, under one lease."""
    worth_waiting_bytes: int = 16 << 20
    """A smaller shard is read from a busy holder sooner than from a reader that has yet to begin."""
    begin_within_s: float = 5.0
    """A promised reader that has not begun by then is no source any more if there is a better one."""
    advance_within_s: float = 10.0
    """One that reads another layout and could come on, but has not by then, is no source any more likewise."""
    policy: Policy = AUTO
    """What readers are spread over sources by."""
    agent_within_s: float = 10.0
    """A zone does not wait for a seed agent that has not come on for so long with what is newest elsewhere."""
    retain: int = 0
    retain_models: tuple[tuple[str, int], ...] = ()
    """Newest whole versions of a model that no client's call may lose (law L11), and those of models by name."""
    kept_versions: int = 64
    kept_rounds: int = 8

    def retain_of(self, model: ModelName) -> int:
        """Return how many versions of a model are retained."""
        return dict(self.retain_models).get(model, self.retain)
