"""Machines that are not there: network namespaces joined by a bridge, each behind a link with a rate that can be cut.

A network may have several zones, each with a switch of its own; what joins them is not made here (bench/clusters).

Needs root and iproute2; `why_unavailable` says what is missing. Everything is gone when the `Network` is closed, and
what a killed run has left behind goes with the next one. Used by benches and by the tests of cut links.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

_PREFIX = "thub"
_COMMAND_TIMEOUT_S = 20.0
_SUBNET = "10.213.0"
_MOST_HOSTS = 250
_BURST = "128kb"
_LATENCY = "50ms"
"""How long a packet may queue at a limited link before it is dropped."""


def why_unavailable() -> str:
    """Return why no namespaces can be made here, or an empty text if they can."""
    if os.name != "posix" or os.geteuid() != 0:
        return "network namespaces need root"
    for program in ("ip", "tc"):
        if shutil.which(program) is None:
            return f"network namespaces need {program!r} (package iproute2)"
    try:
        with Network() as network:
            network.host("probe", rate_mbit=1000)
    except NetworkError as error:
        return f"network namespaces do not work here: {error}"
    return ""


class NetworkError(Exception):
    """A command that sets up the network failed; the text has its words."""


class Host:
    """One namespace: programs run in it behind `command`, and reach the others at their `address`."""

    def __init__(self, network: Network, name: str, number: int, zone: str = "") -> None:
        self.name, self.zone = name, zone
        self.switch = network.switches[zone]
        self.namespace = f"{network.tag}-{name}"
        self.port = f"p{number}"
        self.address = f"{_SUBNET}.{number}"
        self.command = ("ip", "netns", "exec", self.namespace)

    def limit(self, rate_mbit: float) -> None:
        """Limit the link in both directions."""
        shape = ["root", "tbf", "rate", f"{rate_mbit:g}mbit", "burst", _BURST, "latency", _LATENCY]
        _run("tc", "-n", self.namespace, "qdisc", "replace", "dev", "eth0", *shape)
        _run("tc", "-n", self.switch, "qdisc", "replace", "dev", self.port, *shape)

    def cut(self) -> None:
        """Cut the link without a sign to anybody: packets vanish in both directions."""
        _run("ip", "-n", self.switch, "link", "set", self.port, "nomaster")

    def mend(self) -> None:
        """Undo `cut`."""
        _run("ip", "-n", self.switch, "link", "set", self.port, "master", "br0")


class Network:
    """Hosts around one switch, or around one in each zone, all in one subnet; a context manager."""

    def __init__(self, zones: Sequence[str] = ("",)) -> None:
        _remove_leftovers()
        self.tag = f"{_PREFIX}-{os.getpid()}-{secrets.token_hex(2)}"
        self.switches = {zone: f"{self.tag}-switch{zone and '-'}{zone}" for zone in zones}
        self.hosts: list[Host] = []
        try:
            for switch in self.switches.values():
                _run("ip", "netns", "add", switch)
                _run("ip", "-n", switch, "link", "add", "br0", "type", "bridge")
                _run("ip", "-n", switch, "link", "set", "br0", "up")
        except BaseException:
            self.close()
            raise

    def host(self, name: str, rate_mbit: float | None = None, zone: str = "") -> Host:
        """Add a host to a zone, its link limited to `rate_mbit` in both directions (None = as fast as this machine)."""
        number = len(self.hosts) + 1
        if number > _MOST_HOSTS:
            raise NetworkError(f"a network has at most {_MOST_HOSTS} hosts")
        host = Host(self, name, number, zone)
        self.hosts.append(host)
        inside, switch = host.namespace, host.switch
        _run("ip", "netns", "add", inside)
        pair = ["type", "veth", "peer", "name", "eth0", "netns", inside]
        _run("ip", "link", "add", host.port, "netns", switch, *pair)
        _run("ip", "-n", switch, "link", "set", host.port, "master", "br0", "up")
        _run("ip", "-n", inside, "addr", "add", f"{host.address}/24", "dev", "eth0")
        for device in ("lo", "eth0"):
            _run("ip", "-n", inside, "link", "set", device, "up")
        if rate_mbit is not None:
            host.limit(rate_mbit)
        return host

    def plug(self, zone: str, device: str) -> None:
        """Join a device that is in the namespace of a zone's switch to that switch."""
        _run("ip", "-n", self.switches[zone], "link", "set", device, "master", "br0", "up")

    def close(self) -> None:
        """Remove all of it; what still runs in a namespace loses its network. Never raises."""
        for namespace in [host.namespace for host in self.hosts] + list(self.switches.values()):
            with contextlib.suppress(NetworkError):
                _run("ip", "netns", "del", namespace)
        self.hosts.clear()

    def __enter__(self) -> Network:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def sent_and_received_bytes(pid: int) -> tuple[int, int]:
    """Return the bytes that have left and entered `eth0` of the namespace in which a process runs."""
    for line in Path(f"/proc/{pid}/net/dev").read_text().splitlines():
        name, _, figures = line.partition(":")
        if name.strip() == "eth0":
            fields = figures.split()
            return int(fields[8]), int(fields[0])
    raise NetworkError(f"process {pid} has no eth0")


def _remove_leftovers() -> None:
    """Remove the namespaces of runs that were killed: their names carry a process id that is no more."""
    for line in _run("ip", "netns", "list").splitlines():
        found = re.match(rf"{_PREFIX}-(\d+)-[0-9a-f]{{4}}-\S+", line)
        if found is not None and not Path(f"/proc/{found[1]}").exists():
            with contextlib.suppress(NetworkError):
                _run("ip", "netns", "del", found[0])


def _run(*command: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_COMMAND_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NetworkError(f"{' '.join(command)}: {error}") from None
    if done.returncode != 0:
        raise NetworkError(f"{' '.join(command)}: {done.stderr.strip() or done.returncode}")
    return done.stdout
