"""Settle where this process runs, its zone, host and rail, and say where each was learnt: the choice is pure.

The order is the same for all three: argument, then option or environment variable TENSORHUB_ZONE / HOST / RAIL, then
settings file, then what is detected, then empty (unknown, near nobody).

`host` and `rail` only decide which source is near. Whether two processes can read each other's memory, or share a
loopback, is decided by the machine's boot id and the kernel's namespaces (transport/host.py), whatever they are called.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import re
import socket
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from tensorhub_core.settings import Settings
from tensorhub_core.transport.host import this_host
from tensorhub_core.transport.nics import (
    Interface,
    RdmaDevice,
    Slot,
    nearest_device,
    read_gpus,
    read_interfaces,
    read_rdma,
    read_slot,
    same_nic,
    text_of,
)

PODINFO = Path("/etc/podinfo/labels")
"""Where Kubernetes' own examples mount a pod's labels (downward API)."""
ZONE_LABEL = "topology.kubernetes.io/zone"
"""Kubernetes copies it from the node to each pod (since 1.33 behind a gate, by default since 1.35)."""
NODE_VARIABLES = ("NODE_NAME", "K8S_NODE_NAME", "MY_NODE_NAME", "KUBERNETES_NODE_NAME", "KUBE_NODE_NAME")
"""Names under which pods are told their node (`fieldRef: spec.nodeName`); Kubernetes itself sets none."""
ZONE_VARIABLES = ("TOPOLOGY_ZONE", "AVAILABILITY_ZONE")
"""Likewise for the zone (`fieldRef: metadata.labels['topology.kubernetes.io/zone']`)."""
_DATACENTRES = ("RUNPOD_DC_ID", "NOMAD_DC")
_INITIAL_UTS = 4026531838
"""Inode of the machine's own UTS namespace, fixed in Linux (PROC_UTS_INIT_INO): elsewhere the host name is a
container's."""
_NO_NAMES = ("", "localhost", "localhost.localdomain", "(none)")
_LABEL = re.compile(r'^([^="\s]+)="(.*)"$', re.MULTILINE)
_NOTHING = "nothing says it"


@dataclass(frozen=True, slots=True)
class Label:
    """A name and where it was learnt; an empty name is unknown."""

    value: str
    origin: str


@dataclass(frozen=True, slots=True)
class Where:
    """Where a process runs."""

    zone: Label
    host: Label
    rail: Label


@dataclass(frozen=True, slots=True)
class Facts:
    """What of its machine a process sees. `gpu` is where the GPU is plugged in that it computes on, None = none."""

    host_name: str = ""
    boot_id: str = ""
    in_container: bool = False
    pod_labels: str = ""
    interfaces: tuple[Interface, ...] = ()
    rdma: tuple[RdmaDevice, ...] = ()
    gpu: Slot | None = None
    gpus: tuple[Slot, ...] = ()


def settle(
    settings: Settings,
    environ: Mapping[str, str],
    facts: Facts,
    *,
    zone: str | None = None,
    host: str | None = None,
    rail: str | None = None,
) -> Where:
    """Settle all three; the arguments are what the caller gave, None = nothing. Pure."""
    config = settings.client
    return Where(
        _first("zone", zone, config.zone, settings, zones(environ, facts)),
        _first("host", host, config.host, settings, hosts(environ, facts)),
        _first("rail", rail, config.rail, settings, rails(environ, facts, config.interface)),
    )


def _first(name: str, given: str | None, setting: str, settings: Settings, detected: Iterator[Label]) -> Label:
    if given is not None:
        return Label(given, f"argument {name!r}")
    if setting:
        return Label(setting, settings.origins.get(name, "settings"))
    return next(detected, Label("", _NOTHING))


def zones(environ: Mapping[str, str], facts: Facts) -> Iterator[Label]:
    """Yield what can be detected of the datacentre, the surest first."""
    yield from _variables(environ, ZONE_VARIABLES)
    label = pod_label(facts.pod_labels, ZONE_LABEL)
    if label:
        yield Label(label, f"label {ZONE_LABEL} in {PODINFO}")
    cluster = _skypilot(environ)
    for key in ("zone", "region"):
        if key in cluster:
            yield Label(cluster[key], f"{key} in SKYPILOT_CLUSTER_INFO")
    yield from _variables(environ, _DATACENTRES)
    yield from _variables(environ, ("SLURM_CLUSTER_NAME",))


def hosts(environ: Mapping[str, str], facts: Facts) -> Iterator[Label]:
    """Yield what can be detected of the machine's name.

    A container's own host name is none of them: two containers of one machine would look like two machines. Then the
    machine is called after its boot id, which is the same in all of them.
    """
    yield from _variables(environ, NODE_VARIABLES)
    yield from _variables(environ, ("SLURMD_NODENAME",))
    if not facts.in_container and facts.host_name.lower() not in _NO_NAMES:
        yield Label(facts.host_name, "host name")
    if facts.boot_id:
        why = "its host name is a container's" if facts.in_container else "it has no host name of its own"
        yield Label(f"machine-{facts.boot_id.replace('-', '')[:12]}", f"boot id: {why}")
    if facts.host_name:
        yield Label(facts.host_name, "host name")


def rails(environ: Mapping[str, str], facts: Facts, interface: str | None) -> Iterator[Label]:
    """Yield what can be detected of the NIC group.

    That is the NIC that is used, and before it the switch that Slurm knows the machine to be at: the same NIC of
    machines at one switch is one rail. Of a machine's only interface nothing is said.
    """
    nic = _nic(facts, interface)
    switch = slurm_switch(environ)
    if nic is not None and switch:
        yield Label(f"{switch}/{nic.value}", f"SLURM_TOPOLOGY_ADDR and {nic.origin}")
    elif nic is not None:
        yield nic
    elif switch:
        yield Label(switch, "SLURM_TOPOLOGY_ADDR")


def _nic(facts: Facts, interface: str | None) -> Label | None:
    if interface is not None:
        several = len([each for each in facts.interfaces if each.up and each.name != "lo"]) > 1 or facts.rdma
        ports = same_nic(interface, facts.rdma)[1]
        name = ports[0].partition(":")[0] if ports else interface
        return Label(name, f"interface {interface}") if several else None
    near = None if facts.gpu is None else nearest_device(facts.gpu, facts.gpus, facts.rdma)
    if near is None or facts.gpu is None:
        return None
    return Label(near.device, f"nearest RDMA device to GPU {facts.gpu.address}, {near.how}")


def slurm_switch(environ: Mapping[str, str]) -> str:
    """Return the lowest switch or block above this node in Slurm's description of the network; empty if there is none.

    SLURM_TOPOLOGY_ADDR is such as `root.leaf3.node7`, SLURM_TOPOLOGY_ADDR_PATTERN then `switch.switch.node`.
    """
    names = environ.get("SLURM_TOPOLOGY_ADDR", "").split(".")
    kinds = environ.get("SLURM_TOPOLOGY_ADDR_PATTERN", "").split(".")
    found = [name for name, kind in zip(names, kinds, strict=False) if kind in ("switch", "block")]
    return found[-1] if found else ""


def pod_label(text: str, name: str) -> str:
    """Return a label from a file of the downward API, in which each line is KEY="VALUE"; empty if it is not there."""
    return next((value for key, value in _LABEL.findall(text) if key == name), "")


def _variables(environ: Mapping[str, str], names: tuple[str, ...]) -> Iterator[Label]:
    for name in names:
        value = environ.get(name, "").strip()
        if value and value.isprintable():
            yield Label(value, f"environment variable {name}")


def _skypilot(environ: Mapping[str, str]) -> dict[str, str]:
    try:
        found = json.loads(environ.get("SKYPILOT_CLUSTER_INFO", "{}"))
    except (ValueError, RecursionError):
        return {}
    items = found.items() if isinstance(found, dict) else ()
    return {key: value for key, value in items if isinstance(value, str) and value}


def read_facts() -> Facts:
    """Look at this process's machine; takes about a millisecond, never raises."""
    here = this_host()
    return Facts(
        host_name=socket.gethostname(),
        boot_id="" if here is None else here.boot_id,
        in_container=_in_container(),
        pod_labels=text_of(PODINFO) or "",
        interfaces=read_interfaces(),
        rdma=read_rdma(),
        gpu=_gpu(),
        gpus=read_gpus(),
    )


def _in_container() -> bool:
    try:
        return os.stat("/proc/self/ns/uts").st_ino != _INITIAL_UTS
    except OSError:
        return False


def _gpu() -> Slot | None:
    """Return where the GPU is plugged in on which torch computes in this process; None before it uses one.

    Nothing is started to find out: CUDA cannot be used in a forked child of a process that has started it.
    """
    torch = sys.modules.get("torch")
    with contextlib.suppress(Exception):
        if torch is not None and torch.cuda.is_initialized():
            driver, device = ctypes.CDLL("libcuda.so.1"), ctypes.c_int()
            text = ctypes.create_string_buffer(32)
            failed = driver.cuDeviceGet(ctypes.byref(device), int(torch.cuda.current_device()))
            failed = failed or driver.cuDeviceGetPCIBusId(text, len(text), device)
            return None if failed else read_slot(text.value.decode())
    return None
