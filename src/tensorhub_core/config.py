"""Hold every setting in frozen, documented records; `settings.py` fills them from file, environment and arguments.

A field is one setting: its name is the key in the settings file, `TENSORHUB_` + its upper-case name the environment
variable. Durations are in seconds (`_s`), sizes in bytes (`_bytes`). Field names are unique across both records.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from tensorhub_core.errors import ConfigError

DEFAULT_BIND = "tcp://127.0.0.1:7077"


def _setting(default: Any, doc: str, *, least: float | None = None, choices: tuple[str, ...] = ()) -> Any:
    """Declare a setting with its documentation and the values it may have."""
    return field(default=default, metadata={"doc": doc, "least": least, "choices": choices})


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """Settings of the reference server; what concerns leases holds for every client (the server's word wins)."""

    bind: str = _setting(DEFAULT_BIND, "address to listen on; port 0 takes a free one")
    retain: int = _setting(1, "newest whole versions that no client's call may lose; 0 = off", least=0)
    retain_models: str = _setting("", "other `retain` for models by name, as in `policy=2,critic=0`")
    lease_s: float = _setting(
        5.0, "seconds without a heartbeat after which a worker is suspected: it gets no new readers", least=0.05
    )
    heartbeat_s: float = _setting(1.0, "seconds between two heartbeats of a worker", least=0.01)
    grace_s: float | None = _setting(
        None, "seconds after a start in which the server only listens; None = one lease", least=0.0
    )
    policy: str = _setting(
        "auto",
        "how readers are spread over sources (docs/topology.md); auto is for use, the others to compare with",
        choices=("auto", "tree", "star", "chain"),
    )
    idle_s: float = _setting(60.0, "seconds without a worker after which the embedded server ends", least=0.0)
    runtime_dir: str | None = _setting(
        None, "folder of the embedded server's files; None = XDG_RUNTIME_DIR, else one in the temporary folder"
    )
    curve_secret: str | None = _setting(
        None, "path of the server's secret certificate: it then speaks CURVE on tcp:// addresses; None = in the clear"
    )
    curve_clients: str | None = _setting(
        None,
        "folder of the public certificates of the clients that may connect, read again when it changes; None = any",
    )
    journal: str | None = _setting(None, "file to append everything to that the server decides on; None = none")
    journal_limit_bytes: int = _setting(1 << 30, "size at which the journal ends", least=0)
    log_level: str = _setting(
        "info", "least severe message the server logs", choices=("debug", "info", "warning", "error")
    )

    def __post_init__(self) -> None:
        if self.heartbeat_s * 2 > self.lease_s:
            raise ConfigError(
                f"heartbeat_s = {self.heartbeat_s:g} must be at most half of lease_s = {self.lease_s:g},"
                " or one late heartbeat ends a worker"
            )
        if self.grace_s is not None and self.grace_s < self.lease_s:
            raise ConfigError(
                f"grace_s = {self.grace_s:g} must be at least lease_s = {self.lease_s:g}: a restarted server has to"
                " hear from every worker before it decides"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientConfig:
    """Settings of a worker's session and its data plane."""

    server: str | None = _setting(
        None, "address of the reference server, or several with commas between; None = the embedded server of this user"
    )
    curve_server: str | None = _setting(
        None, "path of the server's public certificate, or its key in Z85; None = speak to it in the clear"
    )
    curve_client: str | None = _setting(None, "path of this client's secret certificate")
    connect_timeout_s: float = _setting(10.0, "seconds that connecting to the server may take", least=0.01)
    call_timeout_s: float = _setting(600.0, "what `timeout_s=None` of a worker's call means", least=0.01)
    close_timeout_s: float = _setting(30.0, "seconds that `close()` waits for readers of the copy", least=0.0)
    handover_s: float = _setting(
        10.0, "seconds that `close()` waits for others to take over what is retained through this worker", least=0.0
    )
    offload_limit_bytes: int | None = _setting(
        None,
        "most host memory for copies of retained versions that only this replica holds; None = half of what this "
        "process can take when it connects, shared by the LOCAL_WORLD_SIZE processes of a launcher that sets it",
        least=0,
    )
    zone: str = _setting(
        "", "datacentre of this process: sources there are preferred; empty = detected, if anything says it"
    )
    host: str = _setting(
        "", "name of this machine; empty = detected, at last the host name (docs/operations.md, Places)"
    )
    rail: str = _setting("", "NIC group of this process; empty = detected: the NIC nearest to its GPU, or `interface`")
    transport: str = _setting(
        "auto", "data plane; auto = the best for each peer", choices=("auto", "nixl", "tcp", "cma", "memory")
    )
    interface: str | None = _setting(
        None, "network interface or RDMA device (`eth0`, `mlx5_0`) the data plane uses; None = the transport's choice"
    )
    segment_bytes: int = _setting(4 << 20, "size of a segment: the unit of transfer, check and resume", least=4096)
    staging_bytes: int | None = _setting(
        None,
        "most host memory that `stage()` may take, and that a version passes through which an engine loads in pieces; "
        "None = as much as the shard has, and 256 MiB",
        least=0,
    )
    verify: str = _setting(
        "always",
        "which segments are checked against their checksums when they are read; others may read from a copy that is "
        "still filling only with `always`",
        choices=("always", "sampled", "off"),
    )
    min_run_bytes: int = _setting(
        2048,
        "shortest run of bytes that is read out of a segment when another layout needs only parts of it; 0 = always "
        "whole segments",
        least=0,
    )
    window: int = _setting(8, "reads in flight to one source", least=1)
    stall_s: float = _setting(5.0, "seconds without a byte after which a source is left for another", least=0.05)
