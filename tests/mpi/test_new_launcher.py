"""A launcher that is no part of cputrain, described by one record: it is found, gets its hostfile and its arguments."""

import os
import re
from dataclasses import replace
from pathlib import Path

import pytest

from cputrain.affinity.errors import InputError
from cputrain.affinity.planner.openmp import Runtime
from cputrain.affinity.planner.plan import plan_machine
from cputrain.affinity.planner.request import Request
from cputrain.affinity.rank import LAUNCHER_VARIABLES, LauncherVariables, Rank, rank_from_env
from cputrain.affinity.topology.machine import format_list
from cputrain.mpi.hostfile import HostGroup
from cputrain.mpi.launch_command import build_launch_command, find_launcher
from cputrain.mpi.launchers import LAUNCHERS, HostOptions, InstalledLauncher, Job, Launcher
from tests.support.machines import build_machine

VARIABLES = LauncherVariables(
    convention="example",
    rank_names=("EXAMPLE_RANK", "EXAMPLE_SIZE", "EXAMPLE_LOCAL_RANK", "EXAMPLE_LOCAL_SIZE"),
    prefixes=("EXAMPLE_",),
)
EXAMPLE = Launcher(
    name="example",
    title="the example launcher",
    programs=("example-run",),
    package="example-launcher",
    version=re.compile(r"example launcher, release (\d+)\.(\d+)"),
    newest=(3, 0),
    environment=lambda prefix, _env: (("EXAMPLE_HOME", str(prefix)),),
    own_variables=VARIABLES,
    rank_counts=lambda job, installed: (*(("--root",) if installed.as_root else ()), "--ranks", str(job.world_size)),
    hosts=HostOptions(
        file_format="hydra",
        from_file=lambda path: (f"--hosts-in={path}",),
        inline=lambda job: ("--hosts", "+".join(job.hosts)),
    ),
    unbound=("--bind=none",),
    bound=lambda job, _installed, _folder: (tuple(f"--bind={format_list(w.pus)}" for w in job.plan.workers), ()),
    rank_variable=lambda name, value: ("--set", f"{name}={value}"),
    last_options=("--",),
)
KNOWN = {**LAUNCHERS, EXAMPLE.name: EXAMPLE}
PLAN = plan_machine(build_machine(1, 1, 4, 1), Request(ppn=2, smt=False, comm_cores=0, loader_cores=0), Runtime())
JOB = Job(
    groups=(HostGroup(hosts=("h1", "h2"), plan=PLAN),),
    command=("true",),
    plan_path=Path("plan.json"),
    log_dir=Path("logs"),
    variables=(("NAME", "a value"),),
)
INSTALLED = InstalledLauncher(launcher=EXAMPLE, version=(3, 2), program="/opt/bin/example-run")
SET = ("--set", "MASTER_ADDR=h1", "--set", "NAME=a value")


def test_it_is_found_by_its_version(tmp_path: Path) -> None:
    program = tmp_path / "bin/example-run"
    program.parent.mkdir()
    program.write_text('#!/bin/sh\necho "example launcher, release 3.2 at $EXAMPLE_HOME"\n')
    program.chmod(0o755)
    env = {"PATH": f"{program.parent}:/usr/bin:/bin"}
    found = find_launcher("example", env, KNOWN)
    assert found == InstalledLauncher(
        launcher=EXAMPLE,
        version=(3, 2),
        program=str(program),
        prefix=str(tmp_path),
        as_root=os.geteuid() == 0,
        variables=(("EXAMPLE_HOME", str(tmp_path)),),
    )


def test_inside_a_job_of_its_own_auto_takes_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "example-run").write_text("#!/bin/sh\n")
    (tmp_path / "example-run").chmod(0o755)
    variables = replace(VARIABLES, job_variable="EXAMPLE_JOB")
    own = {**LAUNCHERS, "example": replace(EXAMPLE, version=None, own_variables=variables)}
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    with pytest.raises(InputError, match="no mpirun, mpiexec, srun or example-run on PATH"):
        find_launcher("auto", os.environ, own)
    monkeypatch.setenv("EXAMPLE_JOB", "7")
    assert find_launcher("auto", os.environ, own).program == str(tmp_path / "example-run")


def test_it_is_missed_with_its_package() -> None:
    with pytest.raises(InputError, match="no example on PATH: install example-launcher"):
        find_launcher("example", {"PATH": "/nonexistent"}, KNOWN)


def test_it_gets_a_hostfile_in_its_format_and_its_own_options(tmp_path: Path) -> None:
    made = build_launch_command(JOB, INSTALLED, ("CMD", "x"), tmp_path)
    hosts = tmp_path / "hosts"
    first = ("/opt/bin/example-run", "--ranks", "4", f"--hosts-in={hosts}", "--bind=none")
    assert made.argv == (*first, *SET, "--", "CMD", "x")
    assert made.files == ((hosts, "h1:2\nh2:2\n"),) and made.variables == ()


def test_without_a_folder_its_hosts_stand_in_the_line() -> None:
    made = build_launch_command(JOB, INSTALLED, ("CMD",), None)
    first = ("/opt/bin/example-run", "--ranks", "4", "--hosts", "h1+h2", "--bind=none")
    assert made.argv == (*first, *SET, "--", "CMD") and made.files == ()


def test_its_ranks_know_themselves_by_its_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    env = dict(zip(VARIABLES.rank_names, ("3", "4", "1", "2"), strict=True))
    assert rank_from_env(env) is None
    monkeypatch.setattr("cputrain.affinity.rank.LAUNCHER_VARIABLES", (*LAUNCHER_VARIABLES, VARIABLES))
    assert rank_from_env(env) == Rank(rank=3, world_size=4, local_rank=1, local_world_size=2, convention="example")


def test_the_variables_of_every_launcher_are_known_to_ranks() -> None:
    assert {launcher.own_variables for launcher in LAUNCHERS.values()} <= set(LAUNCHER_VARIABLES)
