"""Command lines of other launchers in our words: every option of theirs is known, and what is printed runs."""

import argparse
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import click
import pytest
from site_pages.other_launchers import other_launchers
from site_pages.text import plain

from cputrain.affinity.errors import InputError
from cputrain.cli import group
from cputrain.mpi.launch_command import find_launcher
from cputrain.other_launchers import PROGRAMS, ForeignLauncher, option_named
from cputrain.other_launchers.parsing import binder_in, join_words, parse_command, split_words
from cputrain.other_launchers.translation import Translation, translate
from tests.support.commands import here, mpi_path, refused
from tests.support.forked import ended, forked, in_fork

OF_HELP = ("-h", "--help", "--usage", "-V", "--version", "-help")


# Each line of another launcher, then what follows `cputrain launch`.
LINES = r"""
torchrun --standalone --nproc-per-node 4 x.py --lr 1
    --ppn 4 x.py --lr 1
torchrun --nproc_per_node=4 -m pkg.train a
    --ppn 4 -m pkg.train a
python3 -u -m torch.distributed.run --nnodes 1:4 --nproc-per-node auto x.py
    --nodes 4 x.py
torchrun --no-python --nproc-per-node 2 ./x
    --ppn 2 -- ./x
torchrun --max-restarts 3 -t 3 --nproc-per-node 2 x.py
    --ppn 2 --restarts 3 x.py
ipexrun x.py
    --instances 1 x.py
ipexrun --nnodes 1 --nprocs-per-node 2 --ccl-worker-count 4 x.py
    --ppn 2 --comm-cores 4 x.py
ipexrun --nnodes 2 --nprocs-per-node 2 x.py
    --hostfile hostfile --ppn 2 x.py
ipexrun --distributed --nproc_per_node 2 --ccl_worker_count 2 x.py
    --ppn 2 --comm-cores 2 x.py
ipexrun --nnodes 2 --nproc_per_node 2 --hostfile h --distributed x.py
    --hostfile h --ppn 2 x.py
CCL_WORKER_COUNT=2 torchrun --nproc-per-node 2 x.py
    --ppn 2 --comm-cores 2 x.py
ipexrun --latency-mode x.py
    --instances latency x.py
ipexrun --throughput_mode --memory-allocator jemalloc x.py
    --instances throughput --allocator jemalloc x.py
ipexrun --ninstances 2 --instance-idx 1 --ncore_per_instance 4 x.py
    --instances 2 --instance 1 --threads 4 x.py
ipexrun --ncores-per-instance 4 --cores-list '0-3, 8' x.py
    --instances 2 --threads 4 --cores 0-3,8 x.py
python -m torch.backends.xeon.run_cpu --ninstances 2 --enable-tcmalloc x.py
    --instances 2 --allocator tcmalloc x.py
horovodrun -np 4 -H h1:2,h2:2 python x.py
    --hosts h1,h2 --ppn 2 -- python x.py
horovodrun -np 4 -H localhost:4 python x.py
    --ppn 4 -- python x.py
mpirun -np 4 -ppn 2 -f hosts -genv FI_PROVIDER tcp python x.py
    --hostfile hosts --ppn 2 -- env FI_PROVIDER=tcp python x.py
OMP_NUM_THREADS=4 mpirun -n 2 -genv I_MPI_PIN_DOMAIN=socket ./a
    --ppn 2 --threads 4 -- ./a
mpirun --host n1,n1,n2,n2 -np 4 -x A=b --bind-to none ./a
    --hosts n1,n2 --ppn 2 -- env A=b ./a
mpirun -np 8 --hostfile hosts -mca btl tcp,self ./a
    --hostfile hosts --ppn 4 -- ./a
accelerate launch --cpu --num_processes 4 --num_machines 1 x.py
    --ppn 4 -- env ACCELERATE_USE_CPU=true python x.py
deepspeed --num_accelerators 4 --bind_cores_to_rank --bind_core_list 0-7 x.py --deepspeed ds.json
    --ppn 4 --cores 0-7 x.py --deepspeed ds.json
deepspeed -H hosts --num_nodes 2 --num_gpus 2 --module train
    --hostfile hosts --ppn 2 -m train
python -m deepspeed.launcher.runner --num_gpus 2 --no_local_rank x.py
    --ppn 2 x.py
mpirun -n 16 -ppn 8 -f hostfile accelerate launch x.py --lr 1
    --hostfile hostfile --ppn 8 x.py --lr 1
mpirun -f hosts -n 4 -ppn 2 -genv CCL_ZE 0 accelerate launch --cpu --num_processes 1 x.py
    --hostfile hosts --ppn 2 -- env CCL_ZE=0 ACCELERATE_USE_CPU=true python x.py
mpirun -n 4 accelerate launch x.py
    --ppn 4 x.py
srun -N 4 --ntasks-per-node=1 accelerate launch --num_machines 4 --num_processes 16 x.py
    --nodes 4 --ppn 4 x.py
srun --ntasks-per-node=1 -N 2 torchrun --nnodes 2 --nproc-per-node 4 x.py
    --nodes 2 --ppn 4 x.py
srun torchrun --nnodes 2 x.py
    --nodes 2 x.py
mpirun -n 2 -ppn 1 -f hosts env A=b torchrun --nproc-per-node 4 -m train
    --hostfile hosts --ppn 4 -- env A=b python -m train
mpirun -np 2 -H n1,n2 bash -c 'torchrun --nproc-per-node 2 x.py'
    --hosts n1,n2 --ppn 2 x.py
mpiexec -n 16 --ppn 8 --depth 4 --cpu-bind depth --no-transfer ./a
    --nodes 2 --ppn 8 --threads 4 -- ./a
mpiexec -d4 -np 8 -ppn 4 --hostlist n1,n2 --env A b -l ./a
    --hosts n1,n2 --ppn 4 --threads 4 -- env A=b ./a
mpirun -np 4 -map-by ppr:2:node:PE=4 ./a
    --nodes 2 --ppn 2 --threads 4 -- ./a
mpirun --map-by ppr:3:NODE -H n1,n2 ./a
    --hosts n1,n2 --ppn 3 -- ./a
mpirun -n 4 --map-by slot:PE=2 ./a
    --ppn 4 --threads 2 -- ./a
srun -lN2-4 -t10:00 -pdebug --ntasks-per-node 2 -K0 -vvv -D/data ./a
    --nodes 4 --ppn 2 -- ./a
srun -n2 -lu -c 2 ./a
    --ppn 2 --threads 2 -- ./a
srun -w ./hosts.txt -n 4 ./a
    --hostfile ./hosts.txt --ppn 2 -- ./a
srun -wn1,n2 -n 4 --hint=multithread ./a
    --hosts n1,n2 --ppn 2 --smt on -- ./a
srun -n 2 --export=ALL,OMP_NUM_THREADS=4,A=b,C= ./a
    --ppn 2 --threads 4 -- env A=b C= ./a
srun -N2 -n 8 -c4 --cpu-bind=cores --exclusive python x.py
    --nodes 2 --ppn 4 --threads 4 -- python x.py
srun --ntasks-per-node=4 --ntasks 8 -D /data -w n[01-02] ./a
    --hosts 'n[01-02]' --ppn 4 -- ./a
srun --nodes=2-4 --ntasks-per-node 2 --threads-per-core=2 ./a
    --nodes 4 --ppn 2 --smt on -- ./a
MASTER_PORT=3 torchrun --nproc-per-node 2 x.py
    --ppn 2 x.py
python -m torch.backends.xeon.run_cpu --ninstances 4 --rank 0 x.py
    --instances 4 --instance 0 x.py
ipexrun --ninstances 4 --instance-idx '0, 2' x.py
    --instances 4 --instance 0,2 x.py
python -m torch.backends.xeon.run_cpu --ninstances 4 --rank -1 x.py
    --instances 4 x.py
mpirun -np 4 -ppn 2 -f $PBS_NODEFILE -genv A "${B} c" python x.py --data ~/data '$literal'
    --hostfile "$PBS_NODEFILE" --ppn 2 -- env "A=${B} c" python x.py --data ~/data '$literal'
mpirun -np 4 --map-by ppr:2:node --prtemca plm_rsh_agent ssh ./a
    --nodes 2 --ppn 2 -- ./a
srun --container-image=torch.sqsh --container-mounts /data:/data -n 2 ./a
    --ppn 2 -- ./a
"""


def pairs(text: str) -> list[tuple[str, str]]:
    """The lines of a text, two and two."""
    lines = [line.strip() for line in text.strip().splitlines()]
    return list(zip(lines[::2], lines[1::2], strict=True))


def unknown(program: ForeignLauncher, names: list[str]) -> list[str]:
    """The names that a program's table lacks."""
    lacking = []
    for name in names:
        try:
            option_named(program, name)
        except InputError:
            lacking.append(name)
    return lacking


def parser_of(name: str) -> argparse.ArgumentParser:
    """A launcher's own parser."""
    if name == "torchrun":
        from torch.distributed.run import get_args_parser

        return get_args_parser()
    if name == "run_cpu":
        from torch.backends.xeon.run_cpu import create_args

        parser = argparse.ArgumentParser()
        create_args(parser)
        return parser
    return pytest.importorskip("accelerate.commands.launch").launch_command_parser()


@pytest.mark.long
@pytest.mark.nightly
def test_every_option_of_an_installed_deepspeed_is_known() -> None:
    """Its parser is inside of a function: its help is read."""
    pytest.importorskip("deepspeed")
    with forked("-m", "deepspeed.launcher.runner", "--help") as process:
        text = ended(process).out
    names = [each for each in re.findall(r"(?:^ +|, )(--?[a-z][\w-]*)", text, re.M | re.I) if each not in OF_HELP]
    assert len(names) > 25
    assert unknown(PROGRAMS["deepspeed"], names) == []


@pytest.mark.parametrize("name", ["torchrun", "run_cpu", "accelerate"])
def test_every_option_of_an_installed_launcher_is_known_with_its_number_of_words(name: str) -> None:
    for action in parser_of(name)._actions:
        for option in action.option_strings:
            if option not in ("-h", "--help"):
                takes = 0 if action.nargs == 0 else 1
                assert option_named(PROGRAMS[name], option).takes == takes, option


@pytest.mark.parametrize("name", ["intelmpi", "mpich", "openmpi4"])
def test_every_option_of_an_mpirun_s_help_is_known(name: str) -> None:
    path = {**os.environ, **mpi_path(name)}
    launcher = name.removesuffix("4")
    env = path | dict(find_launcher(launcher, path).variables)
    root = ["--allow-run-as-root"] if launcher == "openmpi" else []
    program = "mpirun.openmpi" if name == "openmpi4" else "mpirun"
    argv = [program, *root, "--help", *(["full"] if launcher == "openmpi" else [])]
    text = subprocess.run(argv, env=env, capture_output=True, text=True).stdout
    lines = [line.split("  ")[0] for line in (line.strip() for line in text.splitlines()) if line.startswith("-")]
    names = [word for line in lines for word in re.split(r"[|/ ]", line) if re.fullmatch(r"--?[a-zA-Z][\w-]*", word)]
    assert len(names) > 25
    assert unknown(PROGRAMS[launcher], [each for each in names if each not in OF_HELP]) == []


def test_a_table_names_each_option_once_and_says_what_becomes_of_it() -> None:
    for program in PROGRAMS.values():
        names = [name.lstrip("-") for option in program.options for name in option.names]
        assert len(names) == len(set(names)), program.name
        assert all(option.launch_option or option.why for option in program.options), program.name


def test_every_option_of_srun_s_help_is_known(tmp_path: Path) -> None:
    if shutil.which("srun") is None:
        pytest.skip(reason="needs the system package slurm-client (srun)")
    settings = tmp_path / "slurm.conf"
    settings.write_text("ClusterName=c\nSlurmctldHost=localhost\nNodeName=localhost\nPartitionName=p Nodes=ALL\n")
    env = {**os.environ, "SLURM_CONF": str(settings)}
    text = subprocess.run(["srun", "--help"], env=env, capture_output=True, text=True, check=True).stdout
    lines = (line.strip() for line in text.splitlines())
    names = [word for line in lines for word in re.findall(r"(?:^|^-\w, +|^-\w +)(--?\w[\w-]*)", line)]
    assert len(names) > 100
    assert unknown(PROGRAMS["srun"], [each for each in names if each not in OF_HELP]) == []


def ours(line: str, name: str | None = None, hosts: int | None = 2, launcher: str | None = None) -> Translation:
    return translate(
        parse_command(split_words(line), name, lambda program: launcher), cores=8, hosts_in=lambda path: hosts
    )


@pytest.mark.parametrize(("theirs", "expected"), pairs(LINES))
def test_a_command_line_in_our_words(theirs: str, expected: str) -> None:
    assert ours(theirs).line.partition("cputrain launch ")[2] == expected


def test_what_has_no_counterpart_is_named_with_the_reason() -> None:
    found = ours("torchrun --nnodes 2 --node-rank 0 --rdzv-endpoint n1:29500 --nproc-per-node 2 x.py")
    assert [option for option, _ in found.without] == ["--node-rank 0", "--rdzv-endpoint n1:29500"]
    assert all(why for _, why in found.without)
    assert found.line == "cputrain launch --nodes 2 --ppn 2 x.py" and any(
        "--hosts n1,n2" in note for note in found.notes
    )


@pytest.mark.parametrize(
    ("line", "dropped"),
    [
        ("CCL_WORKER_COUNT=4 ipexrun --ninstances 2 x.py", ["CCL_WORKER_COUNT=4"]),
        ("ipexrun --ninstances 2 --ccl-worker-count 4 x.py", ["--ccl-worker-count 4"]),
        ("ipexrun --nprocs-per-node 2 x.py", ["--nprocs-per-node 2"]),
        ("OMP_NUM_THREADS=3 ipexrun --latency-mode x.py", ["OMP_NUM_THREADS=3"]),
        ("ipexrun --nnodes 1 --nprocs-per-node 2 --ninstances 4 x.py", ["--ninstances 4"]),
    ],
)
def test_options_of_copies_and_of_ranks_that_do_not_go_together_are_named(line: str, dropped: list[str]) -> None:
    assert [option for option, _ in ours(line).without] == dropped


@pytest.mark.parametrize(
    "line",
    [
        "torchrun --nproc-per-node 4 x.py",
        "mpirun -np 4 -H n1:2,n2:2 -x A=b ./a",
        "mpirun -np 4 -ppn 2 -f hosts ./a",
        "ipexrun --nnodes 1 --nprocs-per-node 2 --memory-allocator jemalloc --omp-runtime auto x.py",
    ],
)
def test_nothing_is_noted_that_the_line_does_not_ask(line: str) -> None:
    of_all = {PROGRAMS["ipexrun"].remark}
    assert set(ours(line).notes) <= of_all


def test_values_that_mean_something_else_here_are_noted() -> None:
    assert "the maximum of MIN:MAX is used" in ours("torchrun --nnodes 1:4 --nproc-per-node 2 x.py").notes[0]
    assert ours("torchrun --nproc-per-node auto x.py").notes == ("--nproc-per-node auto: the plan decides",)


@pytest.mark.parametrize(
    "line",
    [
        "ipexrun --nnodes 4 --nprocs-per-node 2 --hostfile hosts x.py",
        "ipexrun --nnodes 4 --nprocs-per-node 2 x.py",
        "deepspeed -H hosts --num_nodes 4 --num_gpus 2 x.py",
        "accelerate launch --mpirun-hostfile hosts --num_machines 4 --num_processes 8 x.py",
        "mpirun -n 16 -ppn 4 -f hosts ./a",
        "mpirun -n 16 -ppn 4 -f hostfile accelerate launch x.py",
        "mpirun -n 4 -ppn 1 -f hosts torchrun --nproc-per-node 2 x.py",
        "srun -N 4 -w ./hosts.txt --ntasks-per-node 2 ./a",
    ],
)
def test_a_number_of_hosts_is_never_dropped_in_silence(line: str) -> None:
    """A hostfile that is not here must have as many; one that is here and has others is refused or noted."""
    (path,) = re.search(r"--hostfile (\S+)", ours(line, hosts=None).line).groups()  # type: ignore[union-attr]
    assert f"{path} cannot be read: all its hosts are used, so keep only 4 in it" in ours(line, hosts=None).notes
    assert not any(path in note for note in ours(line, hosts=4).notes)
    for hosts, advice in ((8, "keep only 4 in it"), (2, "add the other 2 to it")):
        try:
            notes = ours(line, hosts=hosts).notes
            assert any(f"all {hosts} hosts of {path} are used: {advice}" in note for note in notes)
        except InputError as error:
            assert f"on {hosts} hosts" in str(error)


@pytest.mark.parametrize(
    "script", ["torchrun x.py && date", "torchrun x.py >log.$PMI_RANK 2>&1", ". ./env; torchrun x.py"]
)
def test_a_shell_s_script_with_more_than_a_launcher_stays_and_is_noted(script: str) -> None:
    translated = ours(f"mpirun -n 2 -ppn 1 bash -lc '{script}'")
    assert translated.line == f"cputrain launch --nodes 2 --ppn 1 -- bash -lc {script!r}"
    assert any("each worker starts torchrun, which" in note for note in translated.notes)


def test_what_stands_before_an_inner_launcher_is_kept_or_named() -> None:
    translated = ours("mpirun -n 2 -ppn 1 env A=b nice -n 5 bash -c 'torchrun --nproc-per-node 2 x.py --lr 1 --seed 2'")
    assert translated.line == "cputrain launch --nodes 2 --ppn 2 -- env A=b python x.py --lr 1 --seed 2"
    assert ("nice -n 5", "put it before cputrain launch") in translated.without


@pytest.mark.parametrize(
    ("command", "program"),
    [
        ("taskset -c 0 python x.py", "taskset"),
        ("/usr/bin/numactl --localalloc python x.py", "numactl"),
        ("env A=b taskset 0x1 ./a", "taskset"),
        ("nice -n 5 timeout -s KILL 10m taskset -c 0 ./a", "taskset"),
        ("stdbuf -o L numactl -N 0 ./a", "numactl"),
        ("bash -c 'taskset -c 0 python x.py; date'", "taskset"),
        ("bash -lc 'cd data && numactl -N 0 python x.py'", "numactl"),
        ("sh -e -c '. ./env\nif true; then taskset 1 ./a; fi'", "taskset"),
        ("sh -c 'taskset -cp 0 $$; ./a'", "taskset"),
        ("taskset --all-tasks --pid 0x1 17", "taskset"),
        ("numactl -N 0 ./a --show", "numactl"),
        ("hwloc-bind core:0 ./a", "hwloc-bind"),
        ("likwid-pin -c 0 ./a", "likwid-pin"),
        ("mpirun -n 2 ./a", "mpirun of Intel MPI"),
        ("sh -c 'exec srun ./a'", "srun"),
        ("torchrun --nproc-per-node 2 x.py", "torchrun"),
        ("accelerate launch x.py", "accelerate launch"),
        ("python -m torch.distributed.run x.py", "torchrun"),
    ],
)
def test_a_command_that_binds_again_is_warned_of(command: str, program: str, tmp_path: Path) -> None:
    warned = here("launch", "--dry-run", "--", *shlex.split(command), cwd=tmp_path).stderr
    assert warned.startswith(f"warning: {program} ") or f"warning: each worker starts {program}, which" in warned
    if program in ("taskset", "numactl", "hwloc-bind", "likwid-pin"):
        assert any(program in note for note in ours(f"torchrun --no-python --nproc-per-node 2 {command}").notes)


@pytest.mark.parametrize(
    "command",
    [
        "x.py taskset",
        "python x.py mpirun",
        "python -m pkg.train",
        "./a numactl",
        "env A=b nice ./a",
        "bash run.sh -c mpirun",
        "python x.py -m torch.distributed.run",
        "sh -c 'a \"taskset'",
        "numactl --hardware",
        "/usr/bin/numactl -s",
        "sh -c 'numactl -H | head -n 3; python x.py'",
        "taskset -p 17",
        "bash -c 'taskset -pc $$ 2>/dev/null && ./a'",
        "taskset --cpu-list --pid 17",
        "taskset --version",
        "hwloc-bind --get",
        "likwid-pin -p",
        "mpirun --version",
        "srun -V",
        "torchrun --help",
    ],
)
def test_a_command_that_stays_bound_is_not(command: str) -> None:
    assert binder_in(tuple(shlex.split(command))) == ""


def test_the_mpiexec_of_hpe_pals_is_known_by_its_place_or_options(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """HPE's has no version of a known MPI; cray-pals lies in /opt/cray/pals."""
    program = tmp_path / "cray/pals/1.4/bin/mpiexec"
    program.parent.mkdir(parents=True)
    program.write_text("#!/bin/sh\necho mpiexec 1.4\n")
    program.chmod(0o755)
    (program.parent / "mpirun").symlink_to("mpiexec")
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    for line in ("mpiexec -n 8 ./a", "mpirun -n 8 ./a", f"{program} -n 8 ./a"):
        made = here("import", line)
        assert made.stdout == "cputrain launch --ppn 8 -- ./a\n"
        assert "PALS starts its ranks on all hosts of its job" in made.stderr and "intelmpi" not in made.stderr


def test_a_guess_that_matters_is_said() -> None:
    line = "mpirun -n 2 -d 4 ./a"
    assert "read as mpirun of Open MPI, as its installation is not known here; --from pals differs" in "".join(
        ours(line).notes
    )
    assert not any("read as" in note for note in ours(line, launcher="openmpi").notes + ours(line, "pals").notes)


@pytest.mark.parametrize("line", ["torchrun x.py", "accelerate launch --ipex x.py", "deepspeed x.py"])
def test_a_number_of_ranks_that_is_not_given_is_the_plan_s_as_a_note_says(line: str) -> None:
    (note,) = ours(line).notes
    assert note.endswith(("without --ppn the plan decides", "without --ppn the plan decides their number"))


@pytest.mark.parametrize("name", ["intelmpi", "openmpi", "mpich", None])
def test_an_mpirun_that_could_be_any_is_that_of_its_launcher(name: str | None) -> None:
    (note,) = ours("mpirun -np 2 ./a", launcher=name).notes
    assert f"(--launcher {name or 'intelmpi'})" in note
    (note,) = ours("mpirun -np 2 -ppn 2 ./a", launcher="openmpi").notes
    assert "(--launcher intelmpi)" in note, "Open MPI has no -ppn"


@pytest.mark.parametrize("name", ["openmpi", "mpich"])
def test_the_mpirun_of_a_line_is_asked_what_it_is_also_in_a_job_of_slurm(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = mpi_path(name)["PATH"]
    (tmp_path / "srun").symlink_to(shutil.which("true") or "")
    monkeypatch.setenv("SLURM_JOB_ID", "1")
    monkeypatch.setenv("PATH", f"{tmp_path}:{found}")
    assert f"(--launcher {name})" in here("import", "mpirun -np 2 ./a").stderr
    monkeypatch.setenv("PATH", str(tmp_path))
    assert f"(--launcher {name})" in here("import", f"{found.partition(':')[0]}/mpirun -np 2 ./a").stderr


@pytest.mark.parametrize(
    ("placement", "threads"),
    [("ppr:1:package", None), ("ppr:2:socket:PE=4", "4"), ("socket:PE=4", "4"), ("ppr:2:numa:pe=3", "3")],
)
def test_a_placement_that_is_not_by_host_is_named_with_what_to_give(placement: str, threads: str | None) -> None:
    found = ours(f"mpirun --map-by {placement} ./a")
    ((option, why),) = found.without
    assert option == f"--map-by {placement}" and "set --ppn to N times their number on a host" in why
    assert found.line == f"cputrain launch {f'--threads {threads} ' if threads else ''}-- ./a"


@pytest.mark.parametrize(
    ("option", "why"),
    [
        ("--hint=nomultithread", "all cores compute, with one hardware thread each"),
        ("--export=NONE", "the ranks inherit the environment"),
        ("--export=A,B=c", "the ranks inherit the environment"),
        ("--export=ALL,B='c,d'", "the ranks inherit the environment"),
        ("-pdebug", "cputrain job slurm -- CMD writes a job script, with --partition, --time and the rest"),
    ],
)
def test_an_option_of_srun_without_counterpart_has_a_true_reason(option: str, why: str) -> None:
    ((_, said),) = ours(f'srun -n 2 "{option}" ./a').without
    assert said == why


def test_variables_that_srun_gives_alone_stand_beside_the_inherited_ones() -> None:
    assert any("the ranks inherit the environment" in note for note in ours("srun -n 2 --export=A=b ./a").notes)
    assert not any("the ranks inherit" in note for note in ours("srun -n 2 --export=ALL,A=b ./a").notes)


def test_the_page_of_options_has_every_remark() -> None:
    page = other_launchers()
    remarks = [
        each
        for one in PROGRAMS.values()
        for each in (one.remark, one.remark_on_one_host, one.remark_without_ranks)
        if each
    ]
    assert len(remarks) >= 6 and all(plain(each) in page for each in remarks)


@pytest.mark.parametrize(
    ("theirs", "expected"),
    [
        ("./x", "calls no known launcher; pass a command line of ipexrun, torchrun"),
        (
            "python x.py --lr 1",
            "no known launcher: cputrain launch x.py --lr 1 starts it once per planned",
        ),
        ("numactl -C 0-3 python x.py", "put numactl before cputrain launch, whose plan uses only the allowed CPUs"),
        ("python -m pkg", "cputrain launch -- python -m pkg starts it"),
        (f"python x.py {'--long 1 ' * 20}'a b'", f"launch x.py {'--long 1 ' * 20}'a b' starts it once per"),
        ("srun -lz2 ./a", "srun has no option -z"),
        ("torchrun --nproc-per-nod=2", "contains no command"),
        ("torchrun --frobnicate x.py", "torchrun has no option --frobnicate"),
        ("torchrun --nnodes two x.py", "'two' is not a number of hosts"),
        ("horovodrun -np 3 -H h1:2,h2:2 ./a", "3 ranks on 2 hosts: cputrain starts equally many workers on every host"),
        ("horovodrun -np 3 -H h1:2,h2:1 ./a", "different numbers of slots"),
        ("mpirun -np 1 ./a : -np 1 ./b", "several programs in one job"),
        ("mpirun -np", "-np needs a value"),
        ("mpirun -np 2 --map-by node --frobnicate ./a", "mpirun of Open MPI has no option --frobnicate"),
        ("srun -N 2 mpirun -n 8 ./a", "srun starts mpirun of Intel MPI here: import that command line alone, and give"),
        ("mpirun -n 2 env A=b python3 -u -m torch.backends.xeon.run_cpu x.py", "starts torch.backends.xeon.run_cpu"),
        ("mpirun -n 8 -ppn 4 torchrun --nproc-per-node 4 x.py", "starts torchrun 4 times on each host, which has a"),
        ("srun -N 2 -n 8 torchrun --nproc-per-node 4 x.py", "srun starts torchrun 4 times on each host"),
        ("srun -N 4 torchrun --nnodes 2 --nproc-per-node 4 x.py", "torchrun 4 times, but that has 2 hosts: give equal"),
        ("torchrun --nnodes=$NODES x.py", "--nnodes $NODES: shell variables are not expanded here"),
        ("srun -n 2 -w $HOSTS ./a", "-w $HOSTS: shell variables are not expanded here"),
        ("torchrun --frobnicate=$A x.py", "torchrun has no option --frobnicate"),
        ("nohup mpirun -n 2 ./a > log &", "import what follows nohup, and put nohup before cputrain launch"),
        ("$SRUN -n 2 ./a", "'$SRUN -n 2 ./a' calls no known launcher"),
        ("ipexrun --memory-allocator mine x.py", "'mine' is unknown; choose one of default, glibc, tcmalloc"),
        ("torchrun 'x.py", "No closing quotation"),
    ],
)
def test_what_cannot_be_read_is_one_line(theirs: str, expected: str) -> None:
    line = refused(here("import", theirs))
    assert expected in line


@pytest.mark.parametrize(
    ("theirs", "expected"),
    [
        ("torchrun --nproc-per-node 2 x.py 2>&1 | tee log", "--ppn 2 x.py 2>&1 | tee log"),
        ("torchrun --nproc-per-node 2 x.py > $LOG 2> 'a b' &", "--ppn 2 x.py > $LOG 2> 'a b' &"),
        ("torchrun --nproc-per-node 2 x.py; echo $?", "--ppn 2 x.py ; echo $?"),
        ("torchrun --nproc-per-node 2 x.py 'a|b' a#b \\; # > c", r"--ppn 2 x.py 'a|b' 'a#b' ';'"),
        ('torchrun --nproc-per-node 2 x.py "a > \\" b"<in', "--ppn 2 x.py 'a > \" b' <in"),
    ],
)
def test_what_follows_a_command_in_a_line_stays_behind_it(theirs: str, expected: str) -> None:
    made = here("import", theirs)
    assert made.returncode == 0 and made.stdout == f"cputrain launch {expected}\n"


@pytest.mark.parametrize(
    "text",
    [
        '"$B c" $(nproc) ${D:-e} "it\'s $A" "it\'s"',
        "bash -c 'echo $RANK'",
        "sh -c \"echo '$HOME' \\$RANK \\`date\\`\"",
        r"a\$b '~/c' ~/d ~ x~ 'e ~/f' ~/",
        """python -c 'print("$A")' '`'""",
    ],
)
def test_a_shell_expands_in_a_line_what_it_has_expanded_before(text: str) -> None:
    show = shlex.join([sys.executable, "-c", "import sys; print(sys.argv[1:])"])
    env = {"PATH": os.environ["PATH"], "HOME": "/h", "RANK": "0", "A": "1", "B": "x  y"}
    first, again = (
        subprocess.run(["bash", "-c", f"{show} {line}"], env=env, check=True, capture_output=True, text=True).stdout
        for line in (text, join_words(split_words(text)))
    )
    assert first == again


def test_what_is_printed_runs(tmp_path: Path) -> None:
    """Ranks of torchrun, then independent copies of run_cpu; the command line parses every line above, too."""
    (tmp_path / "x.py").write_text(
        "import json, os, sys\n"
        "names = ('RANK', 'WORLD_SIZE', 'A')\n"
        "os.write(1, json.dumps([sys.argv[1:], *map(os.environ.get, names)]).encode() + b'\\n')\n"
    )
    lines = {
        "torchrun --standalone --nproc-per-node 2 x.py --lr 1": [[["--lr", "1"], str(i), "2", None] for i in range(2)],
        "python -m torch.backends.xeon.run_cpu --ninstances 2 --rank 1 x.py": [[[], None, None, None]],
        "mpirun -n 2 -env A b python x.py": [[[], str(i), "2", "b"] for i in range(2)],
    }
    for theirs, expected in lines.items():
        made = here("import", theirs)
        assert made.returncode == 0, made.stderr
        words = shlex.split(made.stdout)
        assert words[:2] == ["cputrain", "launch"]
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        ran = in_fork(*words[1:2], "--oversubscribe", *words[2:], cwd=tmp_path, PATH=path)
        assert ran.returncode == 0, ran.stderr
        printed = [json.loads(line.partition("] ")[2]) for line in ran.stdout.splitlines() if line.startswith("[")]
        assert sorted(printed, key=str) == expected


@pytest.mark.parametrize("name", PROGRAMS)
def test_our_launch_has_the_options_that_the_tables_name(name: str) -> None:
    command = group.get_command(click.Context(group), "launch")
    assert command is not None
    known = {each for param in command.params for each in param.opts}
    named = {
        option.launch_option.split()[0] for option in PROGRAMS[name].options if option.launch_option.startswith("-")
    }
    assert named <= known
