"""`tensorhub doctor`: say which transports work on this machine, how fast, and why not."""

from __future__ import annotations

import json
import platform
import sys
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version

import click
from rich.console import Console, Group, RenderableType
from rich.filesize import decimal
from rich.table import Table
from rich.text import Text

from tensorhub_core.cli import loopback, machine
from tensorhub_core.cli.common import existing_server, place_options, printable, server_option
from tensorhub_core.cli.whereabouts import DataPlane, Device, examine_place, network_rows, place_rows, used_row
from tensorhub_core.client.oneshot import ask
from tensorhub_core.client.place import Where
from tensorhub_core.errors import TensorHubError
from tensorhub_core.settings import Settings, load_settings
from tensorhub_core.state.messages import GetStatus, StatusReply
from tensorhub_core.transport.host import Host, rdma_devices
from tensorhub_core.transport.paths import Side, forecast
from tensorhub_core.transport.registry import TRANSPORTS, why_unavailable
from tensorhub_core.wire.curve import client_keys

_FEW_FILES = 1024
_PACKAGES = ("tensorhub-core", "nixl", "torch", "numpy", "pyzmq")


@dataclass(frozen=True, slots=True)
class TransportFinding:
    """Whether a transport loads and what its loopback probe gave; `gb_per_s` counts 1e9 bytes."""

    name: str
    loads: bool
    works: bool
    gb_per_s: float | None
    probe_bytes: int
    reason: str


@dataclass(frozen=True, slots=True)
class Choice:
    """What `auto` takes between two processes like this one, for CPU memory; `transport` is "nothing" if none works."""

    transport: str
    reason: str


@dataclass(frozen=True, slots=True)
class AutoFinding:
    """What `auto` takes within this machine, between two like it, and for memory of devices."""

    within_machine: Choice
    between_machines: Choice
    devices: Choice


@dataclass(frozen=True, slots=True)
class ServerFinding:
    """Whether the reference server answers."""

    address: str | None
    reachable: bool
    epoch: int | None
    models: tuple[str, ...]
    reason: str


@dataclass(frozen=True, slots=True)
class Findings:
    """Everything that `doctor` finds; `--json` prints it as it is."""

    python: str
    system: str
    packages: dict[str, str | None]
    transports: tuple[TransportFinding, ...]
    auto: AutoFinding
    place: Where
    network_cards: tuple[machine.Nic, ...]
    rdma_ports: tuple[machine.RdmaPort, ...]
    rdma_devices: tuple[Device, ...]
    data_plane: DataPlane
    ucx: machine.Ucx
    cross_memory: machine.Cma
    limits: machine.Limits
    server: ServerFinding

    @property
    def healthy(self) -> bool:
        """Tell whether at least one transport moves bytes between processes."""
        return any(transport.works for transport in self.transports)


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print everything as JSON.")
@click.option(
    "--probe-bytes",
    type=click.IntRange(min=1 << 20),
    default=loopback.PROBE_BYTES,
    help="How much each loopback probe moves. [128 MiB]",
)
@place_options
@server_option
def doctor(as_json: bool, probe_bytes: int, server: str | None, place: dict[str, str | None]) -> None:
    """Say which transports work on this machine and how fast, what they have to work with, and if a hub answers.

    Says also as which zone, host and rail a worker here would be known and where each name was learnt, and which NIC
    its bytes would take. Exits with 1 only if no transport moves bytes from one process to another. NIXL need not be
    there: it is for RDMA and GPU memory.
    """
    findings = examine(load_settings(cli={"server": server, **place}), probe_bytes)
    if as_json:
        sys.stdout.write(json.dumps(asdict(findings), indent=2) + "\n")
    else:
        Console().print(render(findings))
    if not findings.healthy:
        click.echo("Error: no transport works here: see the reasons above", err=True)
        click.get_current_context().exit(1)


def examine(settings: Settings, probe_bytes: int) -> Findings:
    """Look at everything; takes some seconds."""
    interface = settings.client.interface
    transports = tuple(examine_transport(name, probe_bytes, interface) for name in TRANSPORTS)
    auto = examine_auto({found.name for found in transports if found.works}, bool(rdma_devices()))
    chosen = settings.client.transport
    where = examine_place(settings, auto.between_machines.transport if chosen == "auto" else chosen)
    return Findings(
        python=platform.python_version(),
        system=platform.platform(),
        packages={name: _installed(name) for name in _PACKAGES},
        transports=transports,
        auto=auto,
        place=where.place,
        network_cards=where.network_cards,
        rdma_ports=where.rdma_ports,
        rdma_devices=where.rdma_devices,
        data_plane=where.data_plane,
        ucx=machine.ucx(),
        cross_memory=machine.cross_memory(),
        limits=machine.limits(),
        server=examine_server(settings.client.server),
    )


def examine_transport(name: str, probe_bytes: int, interface: str | None = None) -> TransportFinding:
    """Load a transport and move bytes from a child process with it."""
    reason = why_unavailable(name)
    if reason:
        return TransportFinding(name, False, False, None, 0, reason)
    result = loopback.probe(name, probe_bytes, interface)
    return TransportFinding(name, True, result.works, result.gb_per_s, result.probe_bytes, result.reason)


def examine_auto(working: set[str], rdma: bool) -> AutoFinding:
    """Say what `auto` would take with the transports that work."""
    within, between = forecast(Side(frozenset(working), Host("this machine", 0, 0), rdma))
    devices = Choice("nixl", "memory of a device")
    if "nixl" not in working:
        devices = Choice("nothing", "memory of a GPU needs NIXL: pip install 'tensorhub-core[nixl]'")
    return AutoFinding(
        within_machine=Choice(within.transport, within.reason),
        between_machines=Choice(between.transport, between.reason),
        devices=devices,
    )


def examine_server(server: str | None) -> ServerFinding:
    """Ask the server that the other commands would use; starts none."""
    address = server
    try:
        address, settings = existing_server(server)
        client = settings.client
        reply = ask(address, GetStatus(), timeout_s=client.connect_timeout_s, keys=client_keys(client))
    except TensorHubError as error:
        return ServerFinding(address, False, None, (), " ".join(str(error).split()))
    if not isinstance(reply, StatusReply):
        return ServerFinding(address, False, None, (), f"it answered with {type(reply).__name__}")
    return ServerFinding(address, True, reply.server_epoch, tuple(model.model for model in reply.models), "")


def _installed(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def render(findings: Findings) -> RenderableType:
    """Lay the findings out for people."""
    versions = ", ".join(f"{name} {found or 'not installed'}" for name, found in findings.packages.items())
    return Group(
        Text(f"Python {findings.python} on {findings.system}"),
        Text(versions, style="dim"),
        *_section("Transports", _transports(findings)),
        *_section("Place", table_of(place_rows(findings.place))),
        *_section("Network", _network(findings)),
        *_section("This machine", _machine(findings)),
        *_section("Hub", _server(findings.server)),
    )


def _section(title: str, body: RenderableType) -> tuple[RenderableType, ...]:
    return (Text(), Text(title, style="bold"), body)


def _table() -> Table:
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2))
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    return table


def table_of(rows: Iterable[tuple[Text, Text, Text]]) -> Table:
    """Return a table of rows: what it is, in a word, and more about it."""
    table = _table()
    for row in rows:
        table.add_row(*row)
    return table


def _mark(good: bool | None, yes: str = "works", no: str = "no") -> Text:
    return Text(yes, style="green") if good else Text(no, style="yellow" if good is None else "red")


def _transports(findings: Findings) -> Table:
    table = _table()
    for found in findings.transports:
        rate = "" if found.gb_per_s is None else f"{found.gb_per_s:.2f} GB/s from a process on this machine"
        mark = _mark(found.works or _not_needed(findings, found), no="does not load" if not found.loads else "fails")
        table.add_row(Text(f"  {found.name}"), mark, Text(rate or found.reason))
    auto = findings.auto
    for where, choice in (
        ("within this machine", auto.within_machine),
        ("between machines", auto.between_machines),
        ("GPU memory", auto.devices),
    ):
        about = Text(f"{where}: {choice.reason}")
        table.add_row(Text("  auto"), _mark(choice.transport != "nothing" or None, choice.transport, "nothing"), about)
    return table


def _not_needed(findings: Findings, found: TransportFinding) -> bool | None:
    """Return None (no cause for alarm) for a transport that is missing where others do all there is to do."""
    return None if findings.healthy and not found.loads else False


def _network(findings: Findings) -> Table:
    table = table_of(network_rows(findings.network_cards, findings.rdma_ports, findings.rdma_devices))
    if not findings.rdma_ports:
        table.add_row(Text("  RDMA"), _mark(None), Text("no RDMA device: between machines transfers go over TCP"))
    table.add_row(*used_row(findings.data_plane))
    ucx = findings.ucx
    about = ", ".join(ucx.devices) or ucx.reason
    table.add_row(Text("  UCX"), _mark(bool(ucx.devices), ucx.version or "found"), Text(about))
    return table


def _machine(findings: Findings) -> Table:
    table = _table()
    cma, limits = findings.cross_memory, findings.limits
    about = "processes of this machine read each other's memory" if cma.works else cma.reason
    table.add_row(Text("  CMA"), _mark(cma.works or None), Text(about))
    shm = f"{_size(limits.shared_memory_free_bytes)} free of {_size(limits.shared_memory_bytes)}"
    table.add_row(Text("  /dev/shm"), Text(""), Text(shm))
    table.add_row(Text("  memory"), Text(""), Text(f"{_size(limits.available_memory_bytes)} available"))
    files = f"{limits.open_files or 'unlimited'} (hard limit {limits.open_files_hard or 'unlimited'})"
    if limits.open_files is not None and limits.open_files <= _FEW_FILES:
        files += ": few for a hub with many workers; `tensorhub serve` raises it to the hard limit"
    table.add_row(Text("  open files"), Text(""), Text(files))
    locked = "unlimited" if limits.locked_memory_bytes is None else decimal(limits.locked_memory_bytes)
    note = ""
    if findings.rdma_ports and limits.locked_memory_bytes is not None:
        note = ": RDMA has to lock all registered memory; raise it (`ulimit -l unlimited`)"
    table.add_row(Text("  locked memory"), Text(""), Text(locked + note))
    return table


def _size(count: int | None) -> str:
    return "unknown" if count is None else decimal(count)


def _server(found: ServerFinding) -> Table:
    table = _table()
    if found.reachable:
        models = ", ".join(printable(model) for model in found.models) or "no models yet"
        about = f"epoch {found.epoch}; {models}"
    else:
        about = found.reason
    table.add_row(
        Text(f"  {found.address or 'none'}"), _mark(found.reachable or None, "answers", "no answer"), Text(about)
    )
    return table
