"""Which network a host has, from /sys trees written here, and over which interface it reaches others."""

import socket
import subprocess
import sys
from pathlib import Path

import pytest

from cputrain.affinity.rank import interface_to
from cputrain.mpi.fabric import FABRICS, fabric_here
from tests.support.fake_hosts import fake_hosts


@pytest.mark.parametrize(
    ("files", "fabric"),
    [
        ({}, "ethernet"),
        ({"sys/class/hfi1/hfi1_0/boardversion": ""}, "opa"),
        ({"sys/class/infiniband/hfi1_0/ports/1/link_layer": "InfiniBand"}, "opa"),
        ({"sys/class/infiniband/mlx5_0/ports/1/link_layer": "InfiniBand"}, "ib"),
        (
            {
                "sys/class/infiniband/mlx5_0/ports/1/link_layer": "InfiniBand",
                "sys/class/infiniband/mlx5_0/ports/1/state": "1: DOWN",
            },
            "ethernet",
        ),
        ({"sys/class/infiniband/mlx5_0/ports/1/link_layer": "Ethernet"}, "ethernet"),
        ({"sys/class/infiniband/rdmap0s6/device/vendor": "0x1d0f"}, "efa"),
        ({"sys/class/infiniband/irdma0/ports/1/link_layer": "Ethernet"}, "psm3"),
        ({"sys/class/cxi/cxi0/device/x": ""}, "slingshot"),
    ],
)
def test_the_fabric_of_a_host(tmp_path: Path, files: dict[str, str], fabric: str) -> None:
    for path, text in files.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text + "\n")
    assert fabric_here(tmp_path) == fabric


def test_every_setting_has_a_reason_and_is_set_once() -> None:
    for fabric in FABRICS.values():
        variables = [variable for variable, _, _ in fabric.settings]
        assert len(set(variables)) == len(variables)
        assert all(value and why for _, value, why in fabric.settings)


def test_the_interface_to_this_host_is_loopback() -> None:
    assert interface_to("127.0.0.1") == "lo"
    assert interface_to("no.such.host.invalid") is None
    if socket.has_ipv6 and Path("/proc/net/if_inet6").read_text(encoding="utf-8"):
        assert interface_to("::1") == "lo"


def test_the_interface_to_another_host_is_that_of_its_route(tmp_path: Path) -> None:
    with fake_hosts(tmp_path / "hosts", 2) as hosts:
        names = "('h2', 'h1', '127.0.0.1')"
        code = f"from cputrain.affinity.rank import interface_to; print(*map(interface_to, {names}))"
        argv = hosts.inside("h1", "env", f"PYTHONPATH={Path.cwd()}", sys.executable, "-c", code)
        assert subprocess.run(argv, capture_output=True, text=True, check=True).stdout.split() == ["eth0", "eth0", "lo"]
