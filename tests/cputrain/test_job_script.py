"""Job scripts: as they read, clean to shellcheck, safe from any value, and run by a real Slurm."""

import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from difflib import unified_diff
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cputrain.affinity.errors import InputError
from cputrain.affinity.planner.plan_file import read_plan
from cputrain.cli import main
from cputrain.jobs.script import BatchJob, Command, Container, Preparation, Resources, Training, job_script, parse_array
from cputrain.mpi import first_host
from cputrain.mpi.fabric import FABRICS
from tests.support.commands import HANGS_S, here, need, refused

PLAIN = BatchJob(
    resources=Resources(name="resnet50", nodes=256, time="02:00:00", cpus=96),
    work=Training(
        recipe="name: resnet50\n",
        settings=(),
        output="runs/resnet50",
        plan_options=("--nodes", "256", "--fabric", "auto"),
        data="/data/imagenet",
    ),
    launcher="srun",
)
FULL = BatchJob(
    resources=replace(
        PLAIN.resources,
        ppn=2,
        tasks=2,
        account="a1",
        mail="me@example.org",
        output="logs/x.out",
        error="logs/x.err",
        directives=("-l software=x", "--comment='a b'"),
    ),
    work=replace(
        PLAIN.work,
        stage="/scratch/x y",
        array=("batch.local", ("16", "32")),
        settings=("plan.threads=20",),
        paths=("weights.pt",),
    ),
    launcher="intelmpi",
    fabric="opa",
    machine="skx-8160-2s",
    module_purge=True,
    modules=("gcc/12", "python"),
    venv="/home/me/my venv",
)
CONTAINED = replace(
    PLAIN, container=Container(image="image's.sif", runtime="apptainer", arguments=("--nv", "--bind=/a b"))
)
PREPARED = BatchJob(
    resources=replace(PLAIN.resources, name="prepare", nodes=1),
    work=Preparation(arguments=("imagenet", "raw", "my data/shards", "--short-side", "256")),
    launcher="srun",
    container=Container(image="docker.io/library/python"),
)
COMMANDED = BatchJob(
    resources=replace(PLAIN.resources, name="train", nodes=2, requeue=False),
    work=Command(argv=("python", "train.py", "it's"), request='{"pin_threads": false, "nodes": 2}'),
    launcher="srun",
    container=Container(image="image", runtime="docker"),
)
BATCHES = {
    "plain": PLAIN,
    "full": FULL,
    "container": CONTAINED,
    "prepare": PREPARED,
    "command": COMMANDED,
}
LIKE = {"full": "plain", "container": "plain", "command": "prepare"}  # a script that has most of its lines
FOR = {"slurm": {"partition": "skx", "qos": "debug", "constraint": "skx&opa"}, "pbs": {"queue": "large"}}


def script_of(which: str, scheduler: str) -> str:
    """The script; the full one with all that only this scheduler knows."""
    batch = BATCHES[which]
    more = FOR[scheduler] if which == "full" else {}
    return job_script(replace(batch, resources=replace(batch.resources, **more)), scheduler)


@pytest.mark.parametrize("scheduler", ["slurm", "pbs"])
@pytest.mark.parametrize("which", BATCHES)
def test_scripts_as_they_read(scheduler: str, which: str, golden) -> None:
    """Two of Slurm's as a whole; of the others what differs: Slurm's from one of these, PBS's from Slurm's."""
    script = script_of(which, scheduler)
    like = which if scheduler == "pbs" else LIKE.get(which)
    if like is None:
        golden(f"batch/{scheduler}-{which}.sh", script)
    else:
        lines = unified_diff(script_of(like, "slurm").splitlines(), script.splitlines(), n=0, lineterm="")
        differing = ["@@" if line.startswith("@@") else line for line in lines][2:]
        golden(f"batch/{scheduler}-{which}.diff", "\n".join(differing))


@pytest.mark.parametrize("scheduler", ["slurm", "pbs"])
@pytest.mark.parametrize("which", BATCHES)
def test_scripts_are_clean_to_shellcheck(scheduler: str, which: str) -> None:
    checker = Path(sys.executable).with_name("shellcheck")
    script = script_of(which, scheduler)
    inner = re.findall(r"<<'END_OF_CONTAINER'\n(.*?)\nEND_OF_CONTAINER\n", script, re.DOTALL)
    assert len(inner) == (BATCHES[which].container is not None)
    for text in (script, *inner):
        result = subprocess.run([checker, "--shell=bash", "-"], input=text, capture_output=True, text=True)
        assert result.returncode == 0, result.stdout


def pbs_lines(script: str) -> dict[str, str]:
    """PBS's own lines: option -> value, resources of -l by name."""
    found = {}
    for line in script.splitlines():
        if line.startswith("#PBS "):
            option, _, value = line.removeprefix("#PBS ").partition(" ")
            key, equals, rest = value.partition("=")
            found[f"{option} {key}" if option == "-l" and equals else option] = rest if option == "-l" else value
    return found


def test_pbs_directives_say_what_is_wanted() -> None:
    assert pbs_lines(script_of("full", "pbs")) == {
        "-N": "resnet50",
        "-S": "/bin/bash",
        "-l select": "256:ncpus=96:mpiprocs=2",
        "-l place": "scatter:excl",
        "-l walltime": "02:00:00",
        "-q": "large",
        "-A": "a1",
        "-M": "me@example.org",
        "-m": "ae",
        "-J": "0-1",
        "-o": "logs/x.out",
        "-e": "logs/x.err",
        "-r": "y",
        "-l software": "x",
        "--comment='a": "b'",
    }


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"partition": "a b"}, "--partition 'a b'"),
        ({"queue": "a\n#PBS -q b"}, "--queue"),
        ({"account": "x;reboot"}, "--account"),
        ({"account": "-x"}, "--account"),
        ({"qos": "debug\n"}, "--qos"),
        ({"constraint": "a b"}, "--constraint"),
        ({"mail": "me@here -x"}, "--mail"),
        ({"mail": "me@here\n#SBATCH -p all"}, "--mail"),
        ({"output": "a b.out"}, "--output"),
        ({"error": "x\ny"}, "--error"),
        ({"error": "-o x"}, "--error"),
        ({"directives": ("--gres=gpu:1\nreboot",)}, "--directive"),
        ({"directives": ("reboot",)}, "--directive"),
        ({"time": "soon"}, "--time 'soon'"),
        ({"time": "1:00\n#SBATCH -p all"}, "--time"),
        ({"time": "\u0661:\u0660\u0660"}, "--time"),
    ],
)
def test_values_that_a_directive_cannot_hold_are_rejected(changes: dict, expected: str) -> None:
    for scheduler in ("slurm", "pbs"):
        with pytest.raises(InputError, match=expected):
            job_script(replace(PLAIN, resources=replace(PLAIN.resources, **changes)), scheduler)


def test_pbs_time_limits_have_no_days() -> None:
    days = replace(PLAIN, resources=replace(PLAIN.resources, time="2-00:00:00"))
    assert "#SBATCH --time=2-00:00:00\n" in job_script(days, "slurm")
    with pytest.raises(InputError, match="with days as hours"):
        job_script(days, "pbs")


def test_a_job_array_is_a_key_and_its_values() -> None:
    assert parse_array("batch.local=16, 32") == ("batch.local", ("16", "32"))
    for text in ("batch.local", "=1", "a b=1", "x=1,,2", "$(x)=1"):
        with pytest.raises(InputError, match="--array"):
            parse_array(text)


# Each breaks out of one way of quoting; all at once they would only be a syntax error, which runs nothing.
PAYLOADS = (
    *("$(touch canary)", "`touch canary`", "; touch canary; ", "\ntouch canary\n", "| touch canary", "&touch canary&"),
    *("'; touch canary; '", "'$(touch canary)'", '"; touch canary; "', '"$(touch canary)"', "${x:-$(touch canary)}"),
    *(")\ntouch canary\n(", "END_OF_RECIPE\ntouch canary\n", "a[$(touch canary)]", "#\ntouch canary"),
)
HOSTILE = st.tuples(st.text("ab /-=.,", max_size=6), st.sampled_from(PAYLOADS)).map("".join)


def staged_from(text: str) -> str:
    """One folder's name of this text."""
    return "data" + text.replace("/", "_")


def hostile(texts: list[str], which: str) -> BatchJob:
    """A job in which every value that a user may give is one of these texts."""
    name, recipe, setting, output, image, stage, value, data = texts
    recipe += "\n"  # as every file that is written into a script ends: without it the rest would be the file's
    data = staged_from(data)
    work = {
        "train": replace(
            FULL.work,
            recipe=recipe,
            settings=(setting,),
            output="run/" + output.replace("/", "_"),
            stage=stage,
            data=data,
            array=("data.path", (value, "2")),
            paths=(setting,),
        ),
        "prepare": Preparation(arguments=("imagenet", data, "run/" + output.replace("/", "_"), "--seed", value)),
        "command": Command(argv=(setting, value), request=recipe),
    }[which]
    container = Container(image=image, runtime="auto", arguments=(setting,))
    resources = replace(PLAIN.resources, name=name, tasks=2 if which == "train" else 0)
    return replace(PLAIN, resources=resources, work=work, modules=(data,), container=container)


@pytest.mark.slow
@settings(max_examples=30)
@given(
    texts=st.lists(HOSTILE, min_size=8, max_size=8),
    which=st.sampled_from(["train", "prepare", "command"]),
    runtime=st.sampled_from(["apptainer", "podman", "docker"]),
)
@pytest.mark.parametrize("scheduler", ["slurm", "pbs"])
def test_no_value_becomes_shell_code(
    tmp_path_factory: pytest.TempPathFactory, scheduler: str, which: str, texts: list[str], runtime: str
) -> None:
    """The script runs under bash with commands that do nothing; a value that was read as code would leave a file."""
    folder = tmp_path_factory.mktemp("hostile")
    script = job_script(hostile(texts, which), scheduler)
    stubs = folder / "bin"
    stubs.mkdir()
    for program in ("srun", "pbsdsh", runtime, "scontrol", "module"):
        (stubs / program).write_text("#!/bin/sh\nexit 0\n")
        (stubs / program).chmod(0o755)
    (folder / "nodes").write_text("h1\nh1\n")
    (folder / staged_from(texts[-1])).mkdir()
    env = {
        "PATH": f"{stubs}:/usr/bin:/bin",
        **{"SLURM_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "0", "SLURM_ARRAY_JOB_ID": "7"},
        **{"PBS_JOBID": "7.pbs", "PBS_ARRAY_INDEX": "0", "PBS_O_WORKDIR": str(folder), "PBS_NODEFILE": "nodes"},
    }
    ran = subprocess.run(["bash", "-c", script], cwd=folder, env=env, capture_output=True, text=True, timeout=HANGS_S)
    assert ran.returncode == 0, ran.stderr  # it went through to its end
    assert not list(folder.rglob("canary"))


def test_the_first_host_tells_launcher_and_network(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Rank 0 runs, and listens, where PBS's node file begins; a network variable that the user has set stays."""
    (tmp_path / "nodes").write_text("n9\nn9\nn10\nn10\n")
    options = ("--launcher", "openmpi", "--fabric", "ethernet", "--port", "29507")
    options += ("--request", '{"ppn": 1, "nodes": 2}')
    assert first_host.main([str(tmp_path), *options], {**os.environ, "FI_PROVIDER": "mine"}) == 0
    printed = capsys.readouterr()
    assert (tmp_path / "hosts").read_text() == "n9 slots=1\nn10 slots=1\n"
    token, start = printed.out.splitlines()
    assert token.startswith("export CPUTRAIN_JOB_TOKEN=") and "$(" in token  # no value in a file
    assert start.startswith("launch=(mpirun -np 2 --hostfile ") and "-x CPUTRAIN_JOB_TOKEN)" in start
    assert "-x MASTER_ADDR=n9 -x MASTER_PORT=29507 -x FI_PROVIDER=mine -x I_MPI_FABRICS=shm:ofi" in printed.out
    assert " for 2 hosts: 1 worker per host, " in printed.err and ", fabric ethernet" in printed.err
    plan = read_plan(tmp_path / "plan.json")
    assert plan.request.link_gbit == FABRICS["ethernet"].link_gbit and len(plan.workers) == 1


@pytest.mark.parametrize("work", [("imagefolder",), ("--", "python", "train.py")])
def test_the_login_node_does_not_shape_the_job(work: tuple[str, ...], tmp_path: Path) -> None:
    need("util-linux", "taskset")
    words = ("job", "slurm", "--nodes", "2", "--time", "1:00:00", *work)
    argv = ["taskset", "--cpu-list", "0", sys.executable, "-m", "cputrain", *words]
    few = subprocess.run(argv, cwd=tmp_path, capture_output=True, text=True)
    all_ = here(*words, cwd=tmp_path)
    assert few.returncode == all_.returncode == 0 and few.stdout == all_.stdout
    assert "#SBATCH --exclusive" in all_.stdout and "task" not in all_.stdout.partition("\n\n")[0]
    assert "planned here, on the job's first host" in all_.stdout


RECIPE = ("imagefolder", "--nodes", "2")
SLURM, PBS = ("slurm", *RECIPE), ("pbs", *RECIPE, "--machine", "skx-8160-2s")


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ((*SLURM, "--bind", "launcher"), "--bind launcher"),
        ((*SLURM, "--launcher", "openmpi"), "cannot start slurm jobs"),
        ((*SLURM, "--local-batch", "8"), "set batch.local=8"),
        ((*SLURM, "--queue", "q"), "give --partition"),
        ((*SLURM, "--ncpus", "8"), "--ncpus is not for slurm"),
        ((*PBS, "--ncpus", "99999999999"), "1<=x<=65536"),
        ((*SLURM, "--submit", "--chain", "99999999999"), "1<=x<=1000"),
        (("slurm", "imagefolder", "--hosts", "n1,n2"), "give --nodes N"),
        ((*PBS, "--partition", "p"), "give --queue"),
        ((*PBS, "--qos", "q"), "--directive"),
        ((*PBS, "--constraint", "c"), "--directive"),
        ((*PBS, "--launcher", "torchrun"), "intelmpi, openmpi or mpich"),
        (("pbs", *RECIPE), "--ncpus N"),
        (("pbs", *RECIPE, "--ncpus", "8", "--launcher", "openmpi"), "give --ppn N"),
        (("slurm",), "name a RECIPE"),
        ((*SLURM, "--", "python"), "one thing"),
        ((*SLURM, "--qoss", "x"), "--qos"),
        ((*SLURM, "--output", "~/x/%j.out"), "write the folder in full"),
        ((*PBS, "--error", "n1:~/x.err"), "write the folder in full"),
        ((*SLURM, "--chain", "3"), "--submit"),
        ((*SLURM, "--stage", "/scratch", "data.path=null"), "data.path"),
        (("slurm", "--array", "batch.local=1,2", "--", "python"), "--array"),
        (("slurm", "--prepare", "imagenet", "a", "b", "--ppn", "2"), "--ppn"),
        (("slurm", "--prepare", "imagenet", "a", "b", "--nodes", "2"), "--nodes"),
        (("slurm", "--prepare", "imagenet", "a", "b", "--fabric", "opa"), "--fabric"),
        (("slurm", "--prepare", "imagenet", "a", "b", "--launcher", "srun"), "--launcher"),
        (("slurm", "--prepare", "imagenette", "a", "b"), "imagenette"),
        (("slurm", "--prepare", "imagenet", "a", "b", "--short-sight", "9"), "--short-sight"),
        ((*SLURM, "--container-arg", "--nv"), "--container"),
        ((*SLURM, "--container", "image.sif", "--venv", "v"), "--venv"),
    ],
)
def test_options_that_a_job_cannot_follow_are_rejected(
    arguments: tuple[str, ...], expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["job", arguments[0], "--time", "1:00:00", *arguments[1:]]) == 2
    printed = capsys.readouterr()
    assert not printed.out and printed.err.count("\n") == 1 and expected in printed.err


def test_submitting_needs_the_scheduler(tmp_path: Path) -> None:
    arguments = ("job", "pbs", "imagefolder", "--nodes", "2", "--machine", "skx-8160-2s", "--time", "1:00:00")
    submitted = here(*arguments, "--submit", cwd=tmp_path, PATH="/none")
    assert submitted.returncode == 2 and "--submit needs qsub" in submitted.stderr  # below the script
    assert "--time" in refused(here(*arguments[:-1], "soon", cwd=tmp_path))


def test_a_command_s_job_has_a_short_name_and_a_missing_output_folder_is_noted(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    job = ("job", "slurm", "--time", "1:00:00", "--")
    for command, name in ((("sh", "-c", "date; python x.py"), "sh"), ((f"{'long' * 20}.py",), "long" * 16)):
        assert main([*job, *command]) == 0
        assert f"#SBATCH --job-name={name}\n" in capsys.readouterr().out
    for file, there in ((f"n1:{tmp_path}/x.out", True), (f"n1:{tmp_path}/logs/x.out", False)):
        assert main(["job", "pbs", "--ncpus", "4", "--time", "1:00:00", "--output", file, "--", "date"]) == 0
        assert (f"mkdir -p {tmp_path}/logs " in capsys.readouterr().err) != there


@pytest.mark.parametrize("words", [(), ("--machine", "skx-8160-2s"), ("--ppn", "2"), ("--fabric", "ib")])
def test_a_command_s_job_takes_the_network_of_its_first_host(
    words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not that of the login node, on which the script is made."""
    scripts = []
    for fabric in ("ethernet", "slingshot"):
        monkeypatch.setattr("cputrain.mpi.fabric.fabric_here", lambda fabric=fabric: fabric)
        made = here("job", "slurm", "--nodes", "2", "--time", "1:00:00", *words, "--", "python", "train.py")
        scripts.append(made.stdout)
        (request,) = re.findall("--request='(.*?)'", made.stdout)
        assert "fabric" not in json.loads(request) and "link_gbit" not in json.loads(request)
        network = first_host.plan_here(request, FABRICS["efa"], (), {}).request
        assert (network.fabric, network.link_gbit) == ("efa", FABRICS["efa"].link_gbit)
    assert scripts[0] == scripts[1] and f"--fabric {words[1] if '--fabric' in words else 'auto'} " in scripts[0]


@pytest.mark.parametrize("job", ["slurm --time 1:00:00", "kubernetes --image x --cpus 8 --memory 8Gi"])
def test_a_job_of_a_command_that_binds_again_is_noted(job: str, tmp_path: Path) -> None:
    made = here("job", *job.split(), "--nodes", "2", "--", "sh", "-c", "cd x && numactl -N 0 ./a", cwd=tmp_path)
    assert made.returncode == 0 and made.stderr.startswith("note: numactl in the command replaces the plan's binding")
    assert not here("job", *job.split(), "--nodes", "2", "--", "./a", cwd=tmp_path).stderr


@pytest.mark.parametrize("scheduler", ["slurm", "pbs"])
def test_a_batch_that_the_images_do_not_fill_is_refused_before_the_job(
    scheduler: str, capsys: pytest.CaptureFixture[str]
) -> None:
    job = ("job", scheduler, "mnist-linear-study", "--time", "1:00:00", "--machine", "skx-8160-2s")
    assert main([*job, "--nodes", "256", "batch.local=512"]) == 2
    printed = capsys.readouterr()
    assert "needs 262,144 images per step, but an epoch has 60,000: set batch.local to 117 or less" in printed.err
    assert not printed.out and main([*job, "--nodes", "256", "batch.local=117"]) == 0
    assert main([*job, "--nodes", "256", "--array", "batch.local=10,512"]) == 0, "each of the array decides by itself"


@pytest.mark.parametrize("scheduler", ["slurm", "pbs"])
def test_a_job_says_that_its_data_is_not_here(scheduler: str, tmp_path: Path) -> None:
    job = ("job", scheduler, *(("--ncpus", "8") if scheduler == "pbs" else ()), "--nodes", "256", "--time", "1:00:00")
    made = here(*job, "resnet50-skx-256node", cwd=tmp_path)
    assert (
        made.returncode == 0
        and (
            "note: data.path=data/imagenet does not exist here: prepare it with `cputrain prepare imagenet SRC "
            "data/imagenet`, or set data.path=DIR to a folder that the job's hosts have\n"
        )
        in made.stderr
    )
    (tmp_path / "data/imagenet").mkdir(parents=True)
    assert "data.path" not in here(*job, "resnet50-skx-256node", cwd=tmp_path).stderr
    assert "data.path" not in here(*job, "linear-regression", cwd=tmp_path).stderr
    assert "data.path=/x does not exist here: set" in here(*job, "imagefolder", "data.path=/x", cwd=tmp_path).stderr
    assert "data.path" not in here(*job, "imagefolder", "--array", "data.path=a,b", cwd=tmp_path).stderr
    none = "note: recipe imagefolder has no data.path: add data.path=DIR, a folder that the job's hosts have\n"
    assert none in here(*job, "imagefolder", cwd=tmp_path).stderr
    pods = (
        "job",
        "kubernetes",
        "imagefolder",
        "--image",
        "i",
        "--cpus",
        "4",
        "--memory",
        "8Gi",
        "--volume",
        "runs:/runs",
    )
    assert here(*pods, cwd=tmp_path).stderr == none and here(*pods, "data.path=/x", cwd=tmp_path).stderr == ""
