import json
import socket
from pathlib import Path

import pytest

from cputrain.affinity.errors import InputError
from cputrain.affinity.planner.plan import plan_machine
from cputrain.affinity.planner.plan_file import plan_from_dict
from cputrain.affinity.planner.request import Request
from cputrain.affinity.topology.catalog import find_machine
from cputrain.mpi.hostfile import cluster_to_dict, expand_hosts, plan_cluster
from cputrain.predict.next_best import compare_plan
from tests.support.commands import here, refused

GROUPS = (
    ("n[0001-4000]", "skx-8160-2s"),
    ("k[0001-3000]", "knl-7250-quad-cache"),
    ("g[0001-3000]", "genoa-9654-2s-nps4"),
)


def test_each_host_group_has_its_plan() -> None:
    cluster = plan_cluster(
        [(expand_hosts(hosts), find_machine(name)) for hosts, name in GROUPS], Request(), compare=compare_plan
    )
    workers = [len(group.plan.workers) for group in cluster.groups]
    assert cluster.world_size == 4000 * workers[0] + 3000 * workers[1] + 3000 * workers[2]
    assert all(group.plan.request.nodes == 10_000 for group in cluster.groups)
    assert "sets the pace" in cluster.warnings[0]
    data = json.loads(json.dumps(cluster_to_dict(cluster)))
    assert [group["hosts"] for group in data["host_groups"]] == [hosts for hosts, _ in GROUPS]
    assert plan_from_dict(data["host_groups"][1]["plan"]) == cluster.groups[1].plan


def test_all_hosts_have_as_many_oneccl_threads() -> None:
    """oneCCL fails to start on ranks with different numbers of threads: a Xeon's core has two, an Arm core one."""
    names = ("skx-8160-2s", "graviton4-1s")
    cluster = plan_cluster(
        [(("n1", "n2"), find_machine(names[0])), (("a1",), find_machine(names[1]))],
        Request(link_gbit=200.0),
        compare=compare_plan,
    )
    alone = [
        plan_machine(find_machine(name), Request(nodes=3, link_gbit=200.0), compare=compare_plan) for name in names
    ]
    threads = [plan.workers[0].env.get("CCL_WORKER_COUNT") for plan in alone]
    assert threads[0] != threads[1]
    together = [group.plan.workers[0].env.get("CCL_WORKER_COUNT") for group in cluster.groups]
    assert together == [min(threads, key=lambda count: int(count or 0))] * 2
    assert len(cluster.groups[0].plan.workers[0].comm_pus) < len(alone[0].workers[0].comm_pus)


def test_comm_cores_that_are_set_stay_and_small_hosts_take_none_away() -> None:
    xeon, arm, small = (find_machine(name) for name in ("skx-8160-2s", "graviton4-2s", "pack:1 core:6 pu:1"))
    asked = plan_cluster([(("n1",), xeon), (("a1",), arm)], Request(comm_cores=2), compare=compare_plan)
    assert [len({pu % 48 for pu in group.plan.workers[0].comm_pus}) for group in asked.groups] == [2, 2]
    assert [group.plan.workers[0].env["CCL_WORKER_COUNT"] for group in asked.groups] == ["2", "2"]
    mixed = plan_cluster([(("n1", "n2"), xeon), (("s1",), small)], Request(), compare=compare_plan)
    assert [group.plan.workers[0].env.get("CCL_WORKER_COUNT") for group in mixed.groups] == ["1", None]
    assert mixed.groups[0].plan.workers[0].comm_pus
    assert any("oneCCL threads" in warning for warning in mixed.warnings)


def test_a_host_in_two_groups_is_refused() -> None:
    machine = find_machine("skx-8160-2s")
    with pytest.raises(InputError, match="host n2 is in two groups"):
        plan_cluster([(("n1", "n2"), machine), (("n2",), machine)], Request())
    with pytest.raises(InputError, match=r"host ana@N2\. is in two groups, as n2: name each host once"):
        plan_cluster([(("n1", "n2"), machine), (("ana@N2.",), machine)], Request())


def test_a_host_is_listed_once_however_it_is_written(tmp_path: Path) -> None:
    plan = ("plan", "--machine", "skx-8160-2s", "--hosts")
    assert "n1 and N1 are the same host" in refused(here(*plan, "n1:2,N1:3"))
    assert "N1 and n1, the same host" in refused(here(*plan, "N1,n1"))
    own = socket.gethostname()
    assert f"--hosts: {own} and localhost are both this host: name it once" in refused(here(*plan, f"{own},localhost"))
    (tmp_path / "hosts").write_text(f"{own}\nn1\n127.0.0.1\n")
    line = refused(here(*plan[:-1], "--hostfile", str(tmp_path / "hosts")))
    assert f"/hosts: {own} and 127.0.0.1 are both this host" in line
    for listed, name in (("localhost,n2", "localhost"), ("n2,127.0.1.1", "127.0.1.1"), ("n2,::1", "::1")):
        assert f"--hosts: {name} means a different host on n2" in refused(here(*plan, listed))
    assert here(*plan, "127.0.0.2,127.0.0.3").returncode == 0  # as people try several hosts on one
    assert here(*plan, "n1,n1.invalid").returncode == 0  # full names, which nobody here knows to be one host's
    groups = (f"--host-group={own}=skx-8160-2s", "--host-group=localhost=skx-8160-2s")
    assert f"{own} and localhost are both this host" in refused(here("plan", *groups))


def test_on_the_command_line() -> None:
    options = [word for hosts, name in GROUPS for word in ("--host-group", f"{hosts}={name}")]
    text = here("plan", *options, "--fabric", "ethernet")
    assert text.returncode == 0, text.stderr
    assert "4,000 hosts: n[0001-4000]" in text.stdout and "knl-7250-quad-cache" in text.stdout
    fabric = text.stdout.partition("fabric ")[2]
    assert fabric.startswith("ethernet") and "I_MPI_FABRICS=shm:ofi" in fabric  # several hosts, not one
    data = json.loads(here("plan", *options, "--format", "json").stdout)
    assert [group["count"] for group in data["host_groups"]] == [4000, 3000, 3000]
    assert "HOSTS=MACHINE" in refused(here("plan", "--host-group", "n1"))
    assert "--host-group" in refused(here("plan", "--host-group", "n1=skx-8160-2s", "--nodes", "2"))
    assert "--format" in refused(here("plan", *options, "--format", "env"))
