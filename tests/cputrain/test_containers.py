"""Jobs in containers: each rank inside, on the outside its launcher; run with stand-ins that hide the host."""

import json
import os
import shlex
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from cputrain.affinity.rank import LAUNCHER_VARIABLES, PREFIXES
from cputrain.jobs.script import Container, Training, container_script
from cputrain.runs.events import read_events
from tests.support.commands import CORES, PYTHON, cputrain, need
from tests.support.images import write_images
from tests.support.slurm_cluster import Slurm

STAND_IN = Path(__file__).parents[1] / "support/container_runtime.py"
RUNTIMES = ("apptainer", "podman", "docker")


@pytest.fixture
def runtimes(tmp_path: Path) -> dict[str, str]:
    """Variables with which each stand-in is found under its name; the log of their calls is CONTAINER_LOG."""
    if os.geteuid() != 0:
        pytest.skip(reason="needs root (mount, chroot)")
    need("util-linux", "unshare")
    programs = tmp_path / "runtimes"
    programs.mkdir()
    for name in RUNTIMES:
        (programs / name).write_text(f'#!/bin/sh\nexec {PYTHON} {shlex.quote(str(STAND_IN))} {name} "$@"\n')
        (programs / name).chmod(0o755)
    (tmp_path / "root").mkdir()
    log = tmp_path / "calls.jsonl"
    log.touch()
    path = f"{programs}:{os.environ['PATH']}"
    return {"PATH": path, "CONTAINER_LOG": str(log), "CONTAINER_ROOT": str(tmp_path / "root")}


def calls(runtimes: dict[str, str]) -> list[list[str]]:
    """What the stand-ins were called with."""
    return [json.loads(line) for line in Path(runtimes["CONTAINER_LOG"]).read_text(encoding="utf-8").splitlines()]


PROBE = """
import json, os, shutil, sys
paths = sys.argv[1:]
print(json.dumps({
    "cwd": os.getcwd(), "uid": os.getuid(), "pus": sorted(os.sched_getaffinity(0)), "env": dict(os.environ),
    "there": [os.path.exists(path) for path in paths],
    "runtimes": [name for name in ("apptainer", "podman", "docker") if shutil.which(name)],
}))
"""


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_inside_are_the_job_s_folders_and_the_rank_s_variables(
    runtime: str, runtimes: dict[str, str], tmp_path: Path
) -> None:
    data, hidden, here = tmp_path / 'da,ta "of": mine', tmp_path / "hidden", tmp_path / "submitted here"
    for folder in (data, hidden, here, tmp_path / "results"):
        folder.mkdir()
    work = Training(
        recipe="",
        settings=(),
        output=str(tmp_path / "results/run"),
        plan_options=(),
        data=str(data),
        stage=str(tmp_path / "not there"),
        paths=(str(data),),
    )
    (here / "container.sh").write_text(container_script(Container(image="image.sif", runtime=runtime), work))
    variables = {
        **{each.rank_names[0]: "3" for each in LAUNCHER_VARIABLES if each.rank_names},
        **{f"{prefix}X": "3" for prefix in PREFIXES},
        "MASTER_ADDR": "n1",
        "FI_PROVIDER": "x",
    }
    cache = tmp_path / "cache"
    env = {**os.environ, **runtimes, **variables, "CPUTRAIN_CACHE": str(cache), "PYTHONPATH": "/host", "SECRET": "kept"}
    pu = min(os.sched_getaffinity(0))
    argv = ["taskset", "--cpu-list", str(pu), "bash", "container.sh", "python", "-c", PROBE]
    paths = [data, cache, tmp_path / "results", hidden]
    ran = subprocess.run([*argv, *map(str, paths)], cwd=here, env=env, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    printed = json.loads(ran.stdout)
    assert (printed["cwd"], printed["uid"], printed["pus"]) == (str(here), os.getuid(), [pu])
    assert printed["there"] == [True, True, True, False] and printed["runtimes"] == []
    assert variables.items() <= printed["env"].items() and printed["env"]["CPUTRAIN_CACHE"] == str(cache)
    assert "PYTHONPATH" not in printed["env"] and ("SECRET" in printed["env"]) == (runtime == "apptainer")


def test_the_first_runtime_on_path_is_taken_and_none_is_told(runtimes: dict[str, str], tmp_path: Path) -> None:
    work = Training(recipe="", settings=(), output="run", plan_options=())
    script = container_script(Container(image="image.sif"), work)
    programs = Path(runtimes["PATH"].partition(":")[0])
    for expected in ("apptainer", "podman", "docker"):
        env = {**os.environ, **runtimes, "PATH": f"{programs}:/usr/bin:/bin"}
        ran = subprocess.run(["bash", "-c", script, "x", "true"], cwd=tmp_path, env=env, capture_output=True, text=True)
        assert ran.returncode == 0, ran.stderr
        assert calls(runtimes)[-1][0] == expected
        (programs / expected).unlink()
    ran = subprocess.run(["bash", "-c", script, "x", "true"], cwd=tmp_path, env=env, capture_output=True, text=True)
    if shutil.which("docker", path="/usr/bin:/bin") is None and shutil.which("podman", path="/usr/bin:/bin") is None:
        assert ran.returncode == 2 and "no apptainer, singularity, podman or docker" in ran.stderr


def done(slurm: Slurm, here: Path, runtimes: dict[str, str], *arguments: str) -> None:
    """Submit a job with the stand-ins on PATH and wait for its end."""
    script = cputrain("job", "slurm", "--time", "00:10:00", "--output", "job.out", *arguments, cwd=here)
    assert script.returncode == 0, script.stderr
    state = replace(slurm, env={**slurm.env, **runtimes}).finish(script.stdout, here)
    assert state == "COMPLETED", (here / "job.out").read_text()


@pytest.mark.long
@pytest.mark.nightly
def test_jobs_in_containers_prepare_and_train(slurm: Slurm, runtimes: dict[str, str], tmp_path: Path) -> None:
    """Each runtime in turn, by a real Slurm; data and results lie beside the folder that it is submitted from."""
    here = tmp_path / "it's mine"
    here.mkdir()
    write_images(tmp_path / "raw images", train=8, val=6)
    shards, runs = tmp_path / "shards of it" / "all", tmp_path / "runs"
    runs.mkdir()
    shards.parent.mkdir()
    prepare = ("--prepare", "imagefolder", str(tmp_path / "raw images"), str(shards), "--shards", "2")
    done(slurm, here, runtimes, "--container", "image", "--container-runtime", "podman", *prepare)
    assert (shards / "manifest.json").is_file()
    assert [call[1] for call in calls(runtimes)] == ["run", "ps"]
    network = ("model.name=lenet", "model.zero_gamma=none", "data.crop=32", "batch.local=6")
    recipe = ("imagefolder", f"data.path={shards}", *network, "epochs=1")
    for runtime in ("apptainer", "docker"):
        Path(runtimes["CONTAINER_LOG"]).write_text("", encoding="utf-8")
        options = ("--ppn", str(CORES), "--container", "image.sif", "--container-runtime", runtime)
        done(slurm, here, runtimes, *recipe, "schedule.warmup_epochs=0", f"output={runs / runtime}", *options)
        events = read_events(runs / runtime)
        assert events[-1]["status"] == "done" and len(events[0]["bindings"]) == CORES
        assert [b["pus"] for b in events[0]["bindings"]] == [b["planned_pus"] for b in events[0]["bindings"]]
        modules = [call[call.index("-m") + 1] for call in calls(runtimes) if "-m" in call]
        assert modules == [
            "cputrain",
            "cputrain.mpi.first_host",
            *["cputrain.affinity.bind"] * CORES,
        ]  # one container a rank
