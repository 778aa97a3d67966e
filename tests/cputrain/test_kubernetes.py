"""Manifests for Kubernetes: as its published schemas have them, and their command run in two hosts of this machine."""

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from cputrain.affinity.errors import InputError
from cputrain.affinity.rank import Pods, pods_of
from cputrain.jobs.kubernetes import MAX_NAME_LENGTH, NAME, PodJob, label_of, manifests
from cputrain.runs.events import read_events
from tests.support.commands import here, refused
from tests.support.fake_hosts import fake_hosts

POD = ("--nodes", "2", "--cpus", "4", "--memory", "8Gi", "--image", "registry/cputrain:1")
RECIPE = ("demo-digits", "output=runs/digits", "--volume", "runs:/runs", "--volume", "data:/data")
# The fields of the controllers' own objects, as their Go types have them: jobset.x-k8s.io/v1alpha2 of JobSet 0.8,
# kubeflow.org/v2beta1 of the MPI operator 0.6. What is below `template` is Kubernetes' own, and checked by its schemas.
FIELDS = {
    "JobSet": {
        "": {"replicatedJobs", "network", "successPolicy", "failurePolicy", "suspend", "ttlSecondsAfterFinished"},
        "network": {"enableDNSHostnames", "subdomain", "publishNotReadyAddresses"},
        "failurePolicy": {"maxRestarts", "rules", "restartStrategy"},
        "replicatedJobs.0": {"name", "template", "replicas", "groupName", "dependsOn"},
    },
    "MPIJob": {
        "": {"slotsPerWorker", "runPolicy", "mpiReplicaSpecs", "sshAuthMountPath", "launcherCreationPolicy"}
        | {"mpiImplementation", "runLauncherAsWorker"},
        "runPolicy": {"cleanPodPolicy", "ttlSecondsAfterFinished", "activeDeadlineSeconds", "backoffLimit"}
        | {"schedulingPolicy", "suspend", "managedBy"},
        "mpiReplicaSpecs": {"Launcher", "Worker"},
        "mpiReplicaSpecs.Launcher": {"replicas", "template", "restartPolicy"},
        "mpiReplicaSpecs.Worker": {"replicas", "template", "restartPolicy"},
    },
}


def made(*words: str) -> list[dict[str, Any]]:
    result = here("job", "kubernetes", *words)
    assert result.returncode == 0, result.stderr
    return list(yaml.safe_load_all(result.stdout))


def at(spec: Any, path: str) -> Any:
    for part in filter(None, path.split(".")):
        spec = spec[int(part) if part.isdigit() else part]
    return spec


def pods_in(manifest: dict[str, Any]) -> list[dict[str, Any]]:
    """Every pod's template in a manifest, as a Pod."""
    spec = manifest.get("spec", {})
    templates = {
        "Job": lambda: [spec["template"]],
        "JobSet": lambda: [spec["replicatedJobs"][0]["template"]["spec"]["template"]],
        "MPIJob": lambda: [replica["template"] for replica in spec["mpiReplicaSpecs"].values()],
    }.get(manifest["kind"], list)()
    return [{"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "x"}, "spec": each["spec"]} for each in templates]


@pytest.mark.parametrize("kind", ["job", "jobset", "mpijob"])
@pytest.mark.parametrize("work", [RECIPE, ("--", "python", "x.py", "$(HOME)")], ids=["recipe", "command"])
def test_the_manifests_are_as_the_schemas_say(kind: str, work: tuple[str, ...]) -> None:
    before = () if work[0] == "--" else work
    found = made(
        *before, *POD, "--kind", kind, "--time", "01:00:00", "--namespace", "hpc", *(work if not before else ())
    )
    newest = kubernetes_validate.latest_version()
    for manifest in found:
        assert NAME.fullmatch(manifest["metadata"]["name"]) and manifest["metadata"]["namespace"] == "hpc"
        if manifest["kind"] in FIELDS:
            for path, known in FIELDS[manifest["kind"]].items():
                assert set(at(manifest["spec"], path)) <= known, path
        else:
            kubernetes_validate.validate(manifest, newest, strict=True)
        for pod in pods_in(manifest):
            kubernetes_validate.validate(pod, newest, strict=True)
            for container in pod["spec"]["containers"]:  # Guaranteed, with whole CPUs
                resources = container["resources"]
                assert resources["requests"] == resources["limits"] and resources["limits"]["cpu"].isdigit()
            mounted = {mount["name"] for each in pod["spec"]["containers"] for mount in each["volumeMounts"]}
            assert mounted == {volume["name"] for volume in pod["spec"]["volumes"]}
    if kind == "jobset":
        job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "x"}}
        kubernetes_validate.validate(job | found[-1]["spec"]["replicatedJobs"][0]["template"], newest, strict=True)
    if not before:
        words = [word for pod in pods_in(found[-1]) for word in pod["spec"]["containers"][0]["command"]]
        assert "$$(HOME)" in words and "$(HOME)" not in words


def test_a_pod_finds_the_first_one_by_its_name_in_the_service() -> None:
    config, secret, service, job = made(*RECIPE, *POD)
    template = job["spec"]["template"]
    assert service["spec"]["selector"].items() <= template["metadata"]["labels"].items()
    env = {each["name"]: each.get("value") for each in template["spec"]["containers"][0]["env"]}
    assert len(secret["stringData"]["token"]) == 32 and "CPUTRAIN_JOB_TOKEN" in env
    assert env["MASTER_ADDR"] == f"{job['metadata']['name']}-0.{service['metadata']['name']}"
    assert template["spec"]["subdomain"] == service["metadata"]["name"] and env["CPUTRAIN_PODS"] == "2"
    assert "name: demo-digits" in config["data"]["recipe.yaml"]
    (jobset,) = [each for each in made(*RECIPE, *POD, "--kind", "jobset") if each["kind"] == "JobSet"]
    container = pods_in(jobset)[0]["spec"]["containers"][0]
    assert {"name": "MASTER_ADDR", "value": "demo-digits-workers-0-0.demo-digits"} in container["env"]
    assert jobset["spec"]["failurePolicy"] == {"maxRestarts": 3}


def test_a_pod_that_starts_again_knows_it_by_the_run_s_folder(tmp_path: Path) -> None:
    """Its rank 0 then continues, and takes no notice of a lock that the pod before has left on a file server."""
    _, _, _, job = made(*RECIPE, *POD)
    shell, flag, text = job["spec"]["template"]["spec"]["containers"][0]["command"]
    told = text.rpartition("exec ")[0] + 'echo "$resume ${TORCHELASTIC_RESTART_COUNT-0} $TORCHELASTIC_RUN_ID"'
    run = tmp_path / "runs/digits"
    run.mkdir(parents=True)
    for names, expected in (((), " 0 demo-digits"), ((".cputrain-run", "recipe.yaml"), "--resume 1 demo-digits")):
        for name in names:
            (run / name).touch()
        seen = subprocess.run([shell, flag, told], cwd=tmp_path, capture_output=True, text=True, check=True)
        assert seen.stdout == f"{expected}\n"


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ((*RECIPE[:2], *POD), "a training needs a volume for its checkpoints"),
        ((*RECIPE, *POD, "--name", "Digits_1"), "--name 'Digits_1' is not a valid name: use a-z, 0-9"),
        ((*RECIPE, *POD, "--memory", "8"), "--memory '8' is not a size"),
        ((*RECIPE, *POD, "--cpus", "9999"), "9999 is not in the range 1<=x<=4096"),
        ((*RECIPE, *POD, "--ppn", "5"), "--ppn 5 needs 5 CPUs, but a pod has --cpus 4"),
        ((*RECIPE, *POD, "--hosts", "a,b"), "Kubernetes chooses the hosts"),
        ((*RECIPE, *POD, "--bind", "launcher"), "--bind launcher does not apply to pods"),
        ((*RECIPE, *POD, "--local-batch", "7"), "--local-batch cannot be combined with a recipe: set batch.local=7"),
        ((*RECIPE, *POD, "--launcher", "mpich"), "--launcher mpich needs an MPIJob: remove it"),
        ((*RECIPE, *POD, "--kind", "mpijob", "--launcher", "srun"), "cannot start an MPIJob: give intelmpi"),
        ((*RECIPE, *POD, "--volume", "runs"), "give CLAIM:PATH"),
        ((*RECIPE, *POD, "--nodes", "20000"), "more than 10,000 pods"),
        ((*RECIPE, *POD, "--time", "1h"), "give HH:MM:SS"),
        (POD, "a job runs one thing"),
    ],
)
def test_what_kubernetes_would_refuse_is_refused(words: tuple[str, ...], expected: str) -> None:
    assert expected in refused(here("job", "kubernetes", *words))


def launched(*words: str) -> list[str]:
    """The command of a pod, in words."""
    command = made(*words)[-1]["spec"]["template"]["spec"]["containers"][0]["command"]
    return shlex.split(command[2].rpartition("exec ")[2]) if command[0] == "sh" else command


def test_every_option_of_the_plan_reaches_the_pods() -> None:
    words = ["--threads", "1", "--smt", "on", "--balance", "batch", "--local-batch", "7", "--link-gbit", "10"]
    command = launched(*POD, *words, "--fabric", "ib", "--", "x.py")
    assert command[command.index("launch") + 1 : command.index("--")] == ["--ppn", "4", *words, "--fabric", "ib"]
    own = launched(*RECIPE, "plan.balance=batch", "batch.local=16", *POD)
    assert " --balance batch --local-batch 16 -- " in " ".join(own)
    config, *_ = made(*RECIPE, *POD, "--balance", "batch")
    assert yaml.safe_load(config["data"]["recipe.yaml"])["plan"]["balance"] == "batch"


def test_a_python_file_runs_under_the_python_of_the_job() -> None:
    (job,) = made("--nodes", "1", *POD[2:], "--", "my_train.py", "--lr", "1")
    command = job["spec"]["template"]["spec"]["containers"][0]["command"]
    assert command[-4:] == ["python", "my_train.py", "--lr", "1"] and job["metadata"]["name"] == "my-train"
    script = here("job", "slurm", "--nodes", "1", "--time", "0:10:00", "--", "my_train.py", "--lr", "1").stdout
    assert "    python my_train.py --lr 1\n" in script and "--job-name=my_train" in script


def test_any_name_becomes_one_that_kubernetes_takes() -> None:
    for text in ("resnet50_8K", "-x-", "", "a" * 99, "../é/x.py", "9.9"):
        assert NAME.fullmatch(label_of(text)) and len(label_of(text)) <= MAX_NAME_LENGTH, text


def test_a_pod_knows_its_place_only_among_pods_of_one_job() -> None:
    assert pods_of({"JOB_COMPLETION_INDEX": "3"}) == Pods()
    assert pods_of({"JOB_COMPLETION_INDEX": "3", "CPUTRAIN_PODS": "4"}) == Pods(index=3, count=4)
    for index in ("4", "-1", ""):
        with pytest.raises(InputError, match="the index must be a number below the count"):
            pods_of({"JOB_COMPLETION_INDEX": index, "CPUTRAIN_PODS": "4"})


@pytest.mark.long
def test_two_pods_train_together_and_continue(tmp_path: Path) -> None:
    """The command of the manifest in two network namespaces, each with one CPU: LeNet, then more of it."""
    cpus = sorted(os.sched_getaffinity(0))
    if len(cpus) < 2 or shutil.which("taskset") is None:
        pytest.skip(reason="needs two cores and the system package util-linux (taskset)")
    with fake_hosts(tmp_path / "hosts", 2) as hosts:
        for steps in ("max_steps=2", "max_steps=4"):
            job = PodJob(
                **{"name": "lenet", "kind": "job", "image": "x", "pods": 2, "cpus": 1, "memory": "1Gi", "ppn": 1},
                launch=("--no-verify",),
                command=(*TRAIN, *TINY, steps, f"output={tmp_path}/run"),
                recipe="-",
                output=f"{tmp_path}/run",
                volumes=(("runs", str(tmp_path)),),
            )
            container = manifests(job)[-1]["spec"]["template"]["spec"]["containers"][0]
            env = {each["name"]: each.get("value", "from the secret") for each in container["env"]}
            env["MASTER_ADDR"] = hosts.names[0]
            path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
            pods = []
            for index, host in enumerate(hosts.names):
                given = {**os.environ, **env, "JOB_COMPLETION_INDEX": str(index), "PATH": path}
                argv = ["taskset", "--cpu-list", str(cpus[index]), *container["command"]]
                streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
                pods.append(subprocess.Popen(hosts.inside(host, *argv), env=given, cwd=tmp_path, text=True, **streams))
            for pod in pods:
                printed, _ = pod.communicate(timeout=280)
                assert pod.returncode == 0, printed
    events = read_events(tmp_path / "run")
    starts = [event for event in events if event["event"] == "start"]
    assert [[binding["pus"] for binding in start["bindings"]] for start in starts] == [[[cpus[0]], [cpus[1]]]] * 2
    assert [event["step"] for event in events if event["event"] == "step"][-1] == 4
    assert sum(event["event"] == "end" for event in events) == 2


TRAIN = ("python", "-m", "cputrain", "train", "large-batch-mnist")
TINY = ("data.path=synthetic", "data.train_images=64", "batch.local=4", "epochs=1", "schedule.warmup_epochs=0")
TINY += ("comm.backend=gloo",)


def test_json_of_a_plan_in_a_pod_counts_all_pods_as_hosts(tmp_path: Path) -> None:
    env = {"CPUTRAIN_PODS": "3", "JOB_COMPLETION_INDEX": "1", "MASTER_ADDR": "first", "CPUTRAIN_JOB_TOKEN": "secret"}
    shown = here("launch", "--ppn", "1", "--dry-run", "true", cwd=tmp_path, **env)
    assert shown.returncode == 0, shown.stderr
    assert re.search(r"RANK=1\b.*WORLD_SIZE=3\b.*MASTER_ADDR=first", shown.stdout)
    assert "all need the same --ppn N" in refused(here("launch", "true", cwd=tmp_path, **env))
