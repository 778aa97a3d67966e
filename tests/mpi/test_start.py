import json
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from affinity.errors import InputError
from affinity.planner.plan import Request, plan_machine
from affinity.planner.plan_file import plan_of_host, worker_from_dict
from affinity.planner.runtime import Runtime
from affinity.topology.catalog import find_machine
from mpi.hosts.groups import Kind, job_plan_json
from mpi.launchers.detect import newest
from mpi.launchers.job import Job
from mpi.launchers.script import HERE, broken, launch_script, line
from mpi.launchers.start import bound, local, rank_variables, start
from tests.support.machines import build_machine


def job(nodes: int, **changes) -> Job:
    plan = plan_machine(find_machine("skx-8160-2s"), Request(ppn=2, nodes=nodes), Runtime())
    hosts = tuple(f"n{i}" for i in range(nodes))
    fields = {"kinds": (Kind(hosts=hosts, plan=plan),), "command": ("python", "a b.py"), "plan_path": Path("p.json")}
    return Job(**{**fields, "log_dir": Path("logs"), **changes})


def test_local_workers_meet_on_loopback() -> None:
    started = local(job(1), 4321)
    assert [env["RANK"] for _, env in started] == ["0", "1"]
    assert all(env["WORLD_SIZE"] == env["LOCAL_WORLD_SIZE"] == "2" for _, env in started)
    assert all((env["MASTER_ADDR"], env["MASTER_PORT"]) == ("127.0.0.1", "4321") for _, env in started)
    assert all(argv[-2:] == ("python", "a b.py") for argv, _ in started)


def test_the_user_s_meeting_place_wins() -> None:
    assert rank_variables(job(2)) == (("MASTER_ADDR", "n0"),)
    named = job(2, master_addr="n0-ib", master_port=5)
    assert rank_variables(named) == (("MASTER_ADDR", "n0-ib"), ("MASTER_PORT", "5"))


@pytest.mark.parametrize("kind", ["intelmpi", "openmpi", "mpich", "srun", "torchrun"])
@pytest.mark.parametrize("binder", ["self", "launcher"])
def test_lines_of_every_launcher(kind: str, binder: str, golden) -> None:
    """Tokens, variables and files of a job on three hosts, as they were read when they were last changed."""
    made_for = [newest(kind)]
    if kind in ("intelmpi", "openmpi"):
        old = (2019, 9) if kind == "intelmpi" else (4, 1)
        made_for.append(replace(newest(kind), version=old, as_root=True, prefix="/opt/mpi"))
    texts = []
    for launcher in made_for:
        if (kind, binder) == ("torchrun", "launcher"):
            with pytest.raises(InputError, match="torchrun binds nobody"):
                start(job(3, binder=binder), launcher, ("CMD",), Path())
            return
        made = start(job(3, binder=binder, variables=(("NAME", "it's"),)), launcher, ("CMD", "a b"), Path())
        texts.append("\n".join([str(launcher.version), broken(made.argv, 90), *map("=".join, made.variables)]))
        texts += [f"{path}:\n{text}" for path, text in made.files]
        if (kind, binder) != ("openmpi", "launcher"):
            texts.append(f"without files\n{line(start(job(3, binder=binder), launcher, ('CMD',), None))}\n")
    golden(f"launch/{kind}-{binder}.txt", "\n".join(texts))


def test_shared_cores_are_bound_by_the_ranks_themselves() -> None:
    plan = plan_machine(build_machine(1, 1, 2, 1), Request(ppn=5, oversubscribe=True), Runtime())
    kinds = (Kind(hosts=("n1", "n2"), plan=plan),)
    argv = start(job(2, kinds=kinds), newest("srun"), ("CMD",), Path()).argv
    assert {"--ntasks-per-node=5", "--cpus-per-task=1", "--overcommit", "--cpu-bind=none"} <= {*argv}
    assert "--exclusive" not in argv
    for kind in ("intelmpi", "openmpi", "mpich", "srun"):
        with pytest.raises(InputError, match="launchers give each rank cores of its own"):
            start(job(2, kinds=kinds, binder="launcher"), newest(kind), ("CMD",), Path())


def test_hosts_of_several_kinds_have_their_own_slots_and_plans(tmp_path: Path) -> None:
    phi = plan_machine(find_machine("knl-7250-snc4-flat"), Request(), Runtime())
    kinds = (*job(2).kinds, Kind(hosts=("k1",), plan=phi))
    mixed = job(2, kinds=kinds)
    assert mixed.world_size == 8
    for kind, text in (("openmpi", "n0 slots=2\nn1 slots=2\nk1 slots=4\n"), ("mpich", "n0:2\nn1:2\nk1:4\n")):
        assert start(mixed, newest(kind), ("CMD",), Path()).files[0][1] == text
    data = json.loads(job_plan_json(kinds))
    assert worker_from_dict(plan_of_host(data, "k1.cluster"), 3) == kinds[1].plan.workers[3]
    assert worker_from_dict(plan_of_host(data, "n1"), 1) == kinds[0].plan.workers[1]
    with pytest.raises(InputError, match="host x is not in the plan"):
        plan_of_host(data, "x")
    with pytest.raises(InputError, match="need --bind self"):
        start(job(2, kinds=kinds, binder="launcher"), newest("mpich"), ("CMD",), Path())
    for kind in ("srun", "torchrun"):
        with pytest.raises(InputError, match="kind"):
            start(mixed, newest(kind), ("CMD",), Path())


def test_ten_thousand_hosts_of_four_ranks() -> None:
    plan = plan_machine(find_machine("skx-8160-2s"), Request(ppn=4, nodes=10_000), Runtime())
    hosts = tuple(f"n{i:05}" for i in range(10_000))
    big = job(1, kinds=(Kind(hosts=hosts, plan=plan),), binder="launcher")
    made = start(big, newest("openmpi"), ("CMD",), Path())
    assert big.world_size == 40_000
    assert made.files[1][1].count("\n") == 40_000


def test_no_verify_reaches_the_rank() -> None:
    assert "--no-verify" in bound(job(1, verify=False))
    assert "--no-verify" not in bound(job(1))
    assert "--keep-env" in bound(job(1, keep_env=True))


@settings(max_examples=40)
@given(texts=st.lists(st.text(min_size=1, max_size=40), min_size=3, max_size=3))
@pytest.mark.parametrize("kind", ["intelmpi", "openmpi", "mpich", "srun", "torchrun"])
def test_no_token_becomes_shell_code(tmp_path_factory, kind: str, texts: list[str]) -> None:
    """launch.sh, run by sh with a launcher that writes down its arguments: they arrive as they were given."""
    safe = (text.replace("\0", "").encode("utf-8", "replace").decode() for text in texts)
    words = [text + "';touch canary;$(touch canary)" for text in safe]
    folder = tmp_path_factory.mktemp("hostile")
    told = replace(newest(kind), program=str(folder / "launcher"))
    made = start(job(3, variables=(("NAME", words[0]),)), told, ("CMD", *words[1:]), HERE)
    (folder / "launcher").write_text('#!/bin/sh\nprintf "%s\\0" "$@" > arguments\nprintf "%s" "${NAME-}" > name\n')
    (folder / "launcher").chmod(0o755)
    (folder / "launch.sh").write_text(launch_script(made, "made\nby $(touch canary) `touch canary`"))
    caller = tmp_path_factory.mktemp("caller")
    subprocess.run(["sh", folder / "launch.sh"], check=True, timeout=30, cwd=caller)
    arguments = (caller / "arguments").read_bytes().decode().split("\0")[:-1]
    assert arguments == [token.replace(str(HERE), str(folder)) for token in made.argv[1:]]
    if kind in ("srun", "torchrun"):
        assert (caller / "name").read_bytes().decode() == words[0]
    assert not [*folder.rglob("canary"), *caller.rglob("canary")] and not Path("canary").exists()
