"""Where a worker runs: one order for zone, host and rail, and every name with where it was learnt."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from tensorhub_core.client.place import Facts, Label, pod_label, read_facts, settle, slurm_switch
from tensorhub_core.settings import load_settings
from tensorhub_core.transport.nics import Interface, RdmaDevice, RdmaPort, Slot

BOOT = "bc894db5-6e0a-4b2f-8bb8-f0fa2e772654"
MACHINE = Facts(host_name="node7", boot_id=BOOT, interfaces=(Interface("eth0", "up"), Interface("lo", "unknown")))
LABELS = 'app="engine"\npod-template-hash="5d"\ntopology.kubernetes.io/zone="eu-1b"\n'


def nic(name: str, path: tuple[str, ...], interface: str) -> RdmaDevice:
    ports = (RdmaPort(name, "1", "active", "400 Gb/sec", "InfiniBand"),)
    return RdmaDevice(name, ports, (interface,), Slot(path, 0))


def where(facts: Facts = MACHINE, environ: Mapping[str, str] | None = None, **more: str | None) -> dict[str, Label]:
    environ = environ or {}
    found = settle(load_settings(environ=environ), environ, facts, **more)
    return {"zone": found.zone, "host": found.host, "rail": found.rail}


@pytest.mark.parametrize("name", ["zone", "host", "rail"])
def test_argument_then_environment_then_file_then_detected_then_nothing(
    name: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    file = tmp_path_factory.mktemp("config") / "config.toml"
    file.write_text(f'{name} = "from-file"\n')
    detected = {"NODE_NAME": "k8s-3", "TOPOLOGY_ZONE": "eu-1a", "SLURM_TOPOLOGY_ADDR": "leaf2.node7"}
    detected |= {"SLURM_TOPOLOGY_ADDR_PATTERN": "switch.node"}
    plain = detected | {"TENSORHUB_CONFIG": str(file)}
    every = plain | {f"TENSORHUB_{name.upper()}": "from-variable"}
    assert where(environ=every, **{name: "given"})[name] == Label("given", f"argument {name!r}")
    assert where(environ=every, **{name: ""})[name] == Label("", f"argument {name!r}")
    assert where(environ=every)[name] == Label("from-variable", f"environment variable TENSORHUB_{name.upper()}")
    assert where(environ=plain)[name] == Label("from-file", str(file))
    found = {"zone": "eu-1a", "host": "k8s-3", "rail": "leaf2"}
    assert where(environ=detected)[name].value == found[name]
    assert where(Facts())[name] == Label("", "nothing says it")


@pytest.mark.parametrize("variable", ["NODE_NAME", "K8S_NODE_NAME", "MY_NODE_NAME", "SLURMD_NODENAME"])
def test_hosts_that_variables_name(variable: str) -> None:
    assert where(environ={variable: "n1"})["host"] == Label("n1", f"environment variable {variable}")


def test_the_host_name_of_a_machine_that_is_none_of_its_own() -> None:
    assert where()["host"] == Label("node7", "host name")
    cloned = where(Facts(host_name="localhost", boot_id=BOOT))["host"]
    assert cloned == Label("machine-bc894db56e0a", "boot id: it has no host name of its own")


def test_containers_of_one_machine_are_on_one_machine() -> None:
    one, other = (where(Facts(host_name=n, boot_id=BOOT, in_container=True))["host"] for n in ("4f1c", "9be0"))
    assert one == other == Label("machine-bc894db56e0a", "boot id: its host name is a container's")
    elsewhere = where(Facts(host_name="4f1c", boot_id="11111111-2222", in_container=True))["host"]
    assert elsewhere.value != one.value


@pytest.mark.parametrize(
    ("environ", "zone", "origin"),
    [
        ({"AVAILABILITY_ZONE": "us-1c"}, "us-1c", "environment variable AVAILABILITY_ZONE"),
        ({"SKYPILOT_CLUSTER_INFO": '{"region": "r", "zone": "z"}'}, "z", "zone in SKYPILOT_CLUSTER_INFO"),
        ({"SKYPILOT_CLUSTER_INFO": '{"region": "r", "zone": null}'}, "r", "region in SKYPILOT_CLUSTER_INFO"),
        ({"SKYPILOT_CLUSTER_INFO": "[1]"}, "", "nothing says it"),
        ({"SKYPILOT_CLUSTER_INFO": "{"}, "", "nothing says it"),
        ({"RUNPOD_DC_ID": "EU-RO-1"}, "EU-RO-1", "environment variable RUNPOD_DC_ID"),
        ({"NOMAD_DC": "dc1"}, "dc1", "environment variable NOMAD_DC"),
        ({"SLURM_CLUSTER_NAME": "alpha"}, "alpha", "environment variable SLURM_CLUSTER_NAME"),
        ({"SLURM_CLUSTER_NAME": "alpha", "TOPOLOGY_ZONE": "z"}, "z", "environment variable TOPOLOGY_ZONE"),
        ({"AWS_REGION": "us-east-1"}, "", "nothing says it"),
        ({"NOMAD_DC": "dc\udc801"}, "", "nothing says it"),
    ],
)
def test_zones_that_variables_name(environ: dict[str, str], zone: str, origin: str) -> None:
    assert where(environ=environ)["zone"] == Label(zone, origin)


def test_the_zone_label_of_a_pod() -> None:
    assert where(Facts(pod_labels=LABELS))["zone"].value == "eu-1b"
    assert "/etc/podinfo/labels" in where(Facts(pod_labels=LABELS))["zone"].origin
    assert pod_label('x="1"', "topology.kubernetes.io/zone") == pod_label("rubbish\n=", "x") == ""


@pytest.mark.parametrize(
    ("names", "kinds", "switch"),
    [
        ("root.leaf3.node7", "switch.switch.node", "leaf3"),
        ("block2.node7", "block.node", "block2"),
        ("node7", "node", ""),
        ("", "", ""),
        ("root", "switch.switch.node", "root"),
    ],
)
def test_the_switch_that_slurm_names(names: str, kinds: str, switch: str) -> None:
    assert slurm_switch({"SLURM_TOPOLOGY_ADDR": names, "SLURM_TOPOLOGY_ADDR_PATTERN": kinds}) == switch


def test_the_rail_is_the_nic_nearest_to_the_gpu() -> None:
    gpus = tuple(Slot(("pci0000:00", f"0000:00:0{k}.0", f"0000:1{k}:00.0"), 0) for k in range(2))
    nics = tuple(nic(f"mlx5_{k}", (*gpus[k].path[:2], f"0000:2{k}:00.0"), f"ib{k}") for k in range(2))
    facts = Facts(rdma=nics, gpus=gpus, gpu=gpus[1])
    assert where(facts)["rail"] == Label(
        "mlx5_1", "nearest RDMA device to GPU 0000:11:00.0, behind the same PCIe switch"
    )
    slurm = {"SLURM_TOPOLOGY_ADDR": "leaf3.n", "SLURM_TOPOLOGY_ADDR_PATTERN": "switch.node"}
    assert where(facts, slurm)["rail"].value == "leaf3/mlx5_1"
    named = where(facts, {"TENSORHUB_INTERFACE": "ib0"})["rail"]
    assert named == Label("mlx5_0", "interface ib0"), "what is named is used, whatever is nearer"
    assert where(Facts(rdma=nics))["rail"].value == "", "without a GPU nothing is nearest"


def test_the_only_interface_is_no_rail() -> None:
    environ = {"TENSORHUB_INTERFACE": "eth0"}
    assert where(environ=environ)["rail"] == Label("", "nothing says it")
    two = Facts(interfaces=(*MACHINE.interfaces, Interface("eth1", "up")))
    assert where(two, environ)["rail"] == Label("eth0", "interface eth0")
    down = Facts(interfaces=(*MACHINE.interfaces, Interface("eth1", "down")))
    assert where(down, environ)["rail"].value == ""


def test_facts_of_this_machine() -> None:
    facts = read_facts()
    assert facts.host_name
    assert "lo" in {each.name for each in facts.interfaces}
    assert where(facts)["host"].value
