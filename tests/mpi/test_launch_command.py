import json
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cputrain.affinity.errors import InputError
from cputrain.affinity.planner.openmp import Runtime
from cputrain.affinity.planner.plan import plan_machine
from cputrain.affinity.planner.plan_file import plan_from_dict, plan_of_host
from cputrain.affinity.planner.request import Request
from cputrain.affinity.topology.catalog import find_machine
from cputrain.mpi.hostfile import HostGroup, job_plan_json
from cputrain.mpi.launch_command import (
    HERE,
    build_launch_command,
    launch_script,
    newest_version,
    shell_line,
    wrapped_command,
)
from cputrain.mpi.launchers import LAUNCHERS, Job, bound_command, local_commands, rank_variables
from tests.support.machines import build_machine

OLD_VERSIONS = {"intelmpi": (2019, 9), "openmpi": (4, 1)}


def job(nodes: int, **changes) -> Job:
    plan = plan_machine(find_machine("skx-8160-2s"), Request(ppn=2, nodes=nodes), Runtime())
    hosts = tuple(f"n{i}" for i in range(nodes))
    fields = {
        "groups": (HostGroup(hosts=hosts, plan=plan),),
        "command": ("python", "a b.py"),
        "plan_path": Path("p.json"),
    }
    return Job(**{**fields, "log_dir": Path("logs"), **changes})


def test_local_workers_meet_on_loopback() -> None:
    commands = local_commands(job(1), 4321)
    environments = [dict(command.variables) for command in commands]
    assert [env["RANK"] for env in environments] == ["0", "1"]
    assert all(env["WORLD_SIZE"] == env["LOCAL_WORLD_SIZE"] == "2" for env in environments)
    assert all((env["MASTER_ADDR"], env["MASTER_PORT"]) == ("127.0.0.1", "4321") for env in environments)
    assert all(command.argv[-2:] == ("python", "a b.py") for command in commands)


def test_the_user_s_meeting_place_wins() -> None:
    assert rank_variables(job(2)) == (("MASTER_ADDR", "n0"),)
    named = job(2, master_addr="n0-ib", master_port=5)
    assert rank_variables(named) == (("MASTER_ADDR", "n0-ib"), ("MASTER_PORT", "5"))


@pytest.mark.parametrize("name", LAUNCHERS)
@pytest.mark.parametrize("binder", ["self", "launcher"])
def test_lines_of_every_launcher(name: str, binder: str, golden) -> None:
    """Tokens, variables and files of a job on three hosts, as they were read when they were last changed."""
    newest = newest_version(name)
    installed = [newest]
    if name in OLD_VERSIONS:
        installed.append(replace(newest, version=OLD_VERSIONS[name], as_root=True, prefix="/opt/mpi"))
    texts = []
    for launcher in installed:
        if (name, binder) == ("torchrun", "launcher"):
            with pytest.raises(InputError, match="torchrun cannot bind its ranks"):
                build_launch_command(job(3, binder=binder), launcher, ("CMD",), Path())
            return
        made = build_launch_command(
            job(3, binder=binder, variables=(("NAME", "it's"),)), launcher, ("CMD", "a b"), Path()
        )
        texts.append("\n".join([str(launcher.version), wrapped_command(made.argv), *map("=".join, made.variables)]))
        texts += [f"{path}:\n{text}" for path, text in made.files]
        if not (newest.launcher.binds_by_file and binder == "launcher"):
            texts.append(
                f"without files\n{shell_line(build_launch_command(job(3, binder=binder), launcher, ('CMD',), None))}\n"
            )
    golden(f"launch/{name}-{binder}.txt", "\n".join(texts))


def test_shared_cores_are_bound_by_the_ranks_themselves() -> None:
    plan = plan_machine(build_machine(1, 1, 2, 1), Request(ppn=5, oversubscribe=True), Runtime())
    groups = (HostGroup(hosts=("n1", "n2"), plan=plan),)
    argv = build_launch_command(job(2, groups=groups), newest_version("srun"), ("CMD",), Path()).argv
    assert {"--ntasks-per-node=5", "--cpus-per-task=1", "--overcommit", "--cpu-bind=none"} <= {*argv}
    assert "--exclusive" not in argv
    for name in ("intelmpi", "openmpi", "mpich", "srun"):
        with pytest.raises(InputError, match="gives each rank separate cores"):
            build_launch_command(job(2, groups=groups, binder="launcher"), newest_version(name), ("CMD",), Path())


def test_each_host_group_has_its_own_slots_and_plan(tmp_path: Path) -> None:
    phi = plan_machine(find_machine("knl-7250-snc4-flat"), Request(), Runtime())
    groups = (*job(2).groups, HostGroup(hosts=("k1",), plan=phi))
    mixed = job(2, groups=groups)
    assert mixed.world_size == 8
    for name, text in (("openmpi", "n0 slots=2\nn1 slots=2\nk1 slots=4\n"), ("mpich", "n0:2\nn1:2\nk1:4\n")):
        assert build_launch_command(mixed, newest_version(name), ("CMD",), Path()).files[0][1] == text
    data = json.loads(job_plan_json(groups))
    assert plan_from_dict(plan_of_host(data, "k1.cluster")).workers[3] == groups[1].plan.workers[3]
    assert plan_from_dict(plan_of_host(data, "n1")).workers[1] == groups[0].plan.workers[1]
    with pytest.raises(InputError, match="host x is not in the plan"):
        plan_of_host(data, "x")
    with pytest.raises(InputError, match="use --bind self"):
        build_launch_command(job(2, groups=groups, binder="launcher"), newest_version("mpich"), ("CMD",), Path())
    for name in ("srun", "torchrun"):
        with pytest.raises(InputError, match=f"{name} starts the same number of ranks on every host"):
            build_launch_command(mixed, newest_version(name), ("CMD",), Path())


def test_open_mpi_keeps_full_names_where_hosts_share_their_first_label() -> None:
    def argv(*hosts: str) -> tuple[str, ...]:
        groups = (HostGroup(hosts=hosts, plan=job(1).groups[0].plan),)
        return build_launch_command(job(1, groups=groups), newest_version("openmpi"), ("CMD",), Path()).argv

    assert "prte_keep_fqdn_hostnames" in argv("w.1.foo", "w.2.foo")
    assert "prte_keep_fqdn_hostnames" not in argv("w1.foo", "w2.foo", "10.0.0.1", "10.0.0.2")


def test_torchrun_and_the_ranks_meet_at_the_first_host_s_bare_name() -> None:
    for first, endpoint, address in (("ana@n1.", "n1.:29500", "n1."), ("[fe80::1]", "[fe80::1]:29500", "fe80::1")):
        groups = (HostGroup(hosts=(first, "n2"), plan=job(1).groups[0].plan),)
        started = build_launch_command(job(1, groups=groups), newest_version("torchrun"), ("CMD",), Path()).argv
        assert f"--rdzv-endpoint={endpoint}" in started
        assert dict(rank_variables(job(1, groups=groups)))["MASTER_ADDR"] == address


def test_ten_thousand_hosts_of_four_ranks() -> None:
    plan = plan_machine(find_machine("skx-8160-2s"), Request(ppn=4, nodes=10_000), Runtime())
    hosts = tuple(f"n{i:05}" for i in range(10_000))
    big = job(1, groups=(HostGroup(hosts=hosts, plan=plan),), binder="launcher")
    made = build_launch_command(big, newest_version("openmpi"), ("CMD",), Path())
    assert big.world_size == 40_000
    assert made.files[1][1].count("\n") == 40_000


def test_no_verify_reaches_the_rank() -> None:
    assert "--no-verify" in bound_command(job(1, verify=False))
    assert "--no-verify" not in bound_command(job(1))
    assert "--keep-env" in bound_command(job(1, keep_env=True))


def test_a_command_too_long_for_hydra_has_few_tokens() -> None:
    long = job(2, command=("prog", *map(str, range(2000))))
    for name, launcher in LAUNCHERS.items():
        argv = build_launch_command(long, newest_version(name), bound_command(long), None).argv
        assert (len(argv) < 50) == (launcher.most_tokens is not None), name
    short = job(2, command=("prog", *map(str, range(400))))
    assert "--json" not in build_launch_command(short, newest_version("mpich"), bound_command(short), None).argv


@settings(max_examples=40)
@given(texts=st.lists(st.text(min_size=1, max_size=40), min_size=3, max_size=3))
@pytest.mark.parametrize("name", LAUNCHERS)
def test_no_token_becomes_shell_code(tmp_path_factory, name: str, texts: list[str]) -> None:
    """launch.sh, run by sh with a launcher that writes down its arguments: they arrive as they were given."""
    safe = (text.replace("\0", "").encode("utf-8", "replace").decode() for text in texts)
    words = [text + "';touch canary;$(touch canary)" for text in safe]
    folder = tmp_path_factory.mktemp("hostile")
    hostile = replace(newest_version(name), program=str(folder / "launcher"))
    made = build_launch_command(job(3, variables=(("NAME", words[0]),)), hostile, ("CMD", *words[1:]), HERE)
    (folder / "launcher").write_text('#!/bin/sh\nprintf "%s\\0" "$@" > arguments\nprintf "%s" "${NAME-}" > name\n')
    (folder / "launcher").chmod(0o755)
    (folder / "launch.sh").write_text(launch_script(made, "made\nby $(touch canary) `touch canary`"))
    caller = tmp_path_factory.mktemp("caller")
    subprocess.run(["sh", folder / "launch.sh"], check=True, timeout=30, cwd=caller)
    arguments = (caller / "arguments").read_bytes().decode().split("\0")[:-1]
    assert arguments == [token.replace(str(HERE), str(folder)) for token in made.argv[1:]]
    if LAUNCHERS[name].rank_variable is None:
        assert (caller / "name").read_bytes().decode() == words[0]
    assert not [*folder.rglob("canary"), *caller.rglob("canary")] and not Path("canary").exists()
