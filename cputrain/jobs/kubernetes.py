"""Manifests of an Indexed Job, a JobSet or an MPIJob for a job in pods, as plain values for YAML.

Each pod is Guaranteed (requests equal limits) and requests whole CPUs: the kubelet's static CPU manager then gives it
exclusive CPUs as a cpuset, which the planner reads.
"""

import re
import shlex
from dataclasses import dataclass, field
from typing import Any

from cputrain.affinity.errors import InputError
from cputrain.affinity.rank import COUNT, MASTER_PORT
from cputrain.affinity.terminal import ExitStatus
from cputrain.mpi.launchers import LAUNCHERS
from cputrain.mpi.supervise.signals import SAVE_S
from cputrain.mpi.supervise.wire import TOKEN_VARIABLE
from cputrain.variables import ATTEMPT, JOB

KINDS = ("job", "jobset", "mpijob")
NAME = re.compile("[a-z0-9]([a-z0-9-]*[a-z0-9])?")  # an RFC 1123 label, as Kubernetes requires
MAX_NAME_LENGTH = 40  # of the 63 characters of a pod's host name, to which controllers append
MEMORY = re.compile("[1-9][0-9]{0,5}(Mi|Gi|Ti)")
IMAGE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/@+-]{0,500}")
MOUNT = re.compile(r"(/[A-Za-z0-9._-]+)+")
MAX_PODS, MAX_CPUS, MAX_RECIPE_BYTES = 10_000, 4096, 900_000  # the limit of a ConfigMap is 1 MiB
RECIPE_FOLDER, RECIPE_FILE = "/etc/cputrain", "recipe.yaml"
WORKERS = "workers"  # the JobSet's only replicated job
MPI_HOSTS = "/etc/mpi/hostfile"  # written by the MPI operator
MPI = {one.name: one.mpi_operator_name for one in LAUNCHERS.values() if one.mpi_operator_name}
GRACE_S = round(SAVE_S) + 30
TOKEN_KEY = "token"

Manifest = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class PodJob:
    """A job in `pods` pods with `cpus` CPUs, `memory` ("64Gi") and `ppn` workers each.

    `launch` are options of `cputrain launch`, `command` is what it starts. `recipe` is the text of a recipe that the
    command trains into the folder `output`, None for any other command. `volumes` are claims and their mount paths; the
    first is the working directory. `restarts` is how often the job may restart after a failure. `token` is the secret
    that authenticates the ranks of several pods.
    """

    name: str
    kind: str
    image: str
    pods: int
    cpus: int
    memory: str
    ppn: int
    launch: tuple[str, ...]
    command: tuple[str, ...]
    recipe: str | None = None
    output: str | None = None
    volumes: tuple[tuple[str, str], ...] = ()
    restarts: int = 3
    namespace: str | None = None
    limit_s: int | None = None
    mpi: str = "openmpi"
    token: str = field(default="", repr=False)


def label_of(text: str) -> str:
    """Convert a name to a Kubernetes label: "resnet50_8K" -> "resnet50-8k"."""
    return re.sub("[^a-z0-9]+", "-", text.lower()).strip("-")[:MAX_NAME_LENGTH].strip("-") or "cputrain"


def check_pod_job(job: PodJob) -> None:
    """Raise InputError for values that Kubernetes would reject."""
    for what, name in (("name", job.name), ("namespace", job.namespace)):
        if name is not None and not (NAME.fullmatch(name) and len(name) <= MAX_NAME_LENGTH):
            raise InputError(
                f"--{what} {name[:60]!r} is not a valid name: use a-z, 0-9 and inner -, at most {MAX_NAME_LENGTH} "
                f"characters, as in {label_of(name)}"
            )
    if not MEMORY.fullmatch(job.memory):
        raise InputError(f"--memory {job.memory[:30]!r} is not a size: write it like 64Gi or 500Mi")
    if not IMAGE.fullmatch(job.image):
        raise InputError(f"--image {job.image[:60]!r} is not an image: write it like registry/cputrain:1")
    for claim, path in job.volumes:
        if not NAME.fullmatch(claim) or len(claim) > 63 or not MOUNT.fullmatch(path):
            raise InputError(f"--volume {claim[:63]}:{path[:60]} is invalid: give CLAIM:PATH, as in runs:/runs")
    if job.recipe is not None and not job.volumes:
        raise InputError("a training needs a volume for its checkpoints: give --volume CLAIM:PATH, as in runs:/runs")
    if job.recipe is not None and len(job.recipe) > MAX_RECIPE_BYTES:
        raise InputError(f"the recipe exceeds {MAX_RECIPE_BYTES:,} characters, the limit for a ConfigMap: shorten it")


def manifests(job: PodJob) -> list[Manifest]:
    """Return the manifests to apply. Raises InputError for values that Kubernetes would reject."""
    check_pod_job(job)
    config = [] if job.recipe is None else [_object(job, "v1", "ConfigMap", data={RECIPE_FILE: job.recipe})]
    if job.kind == "mpijob":
        return [*config, _mpijob(job)]
    if job.pods > 1:
        config.append(_object(job, "v1", "Secret", stringData={TOKEN_KEY: job.token}))
    if job.kind == "jobset":
        return [*config, _jobset(job)]
    service = {"clusterIP": "None", "selector": _labels(job), "publishNotReadyAddresses": True}
    several = [_object(job, "v1", "Service", spec=service)] if job.pods > 1 else []
    return [*config, *several, _object(job, "batch/v1", "Job", spec=_indexed_job(job, job.restarts * job.pods))]


def _object(job: PodJob, version: str, kind: str, **fields: Any) -> Manifest:
    namespace = {} if job.namespace is None else {"namespace": job.namespace}
    metadata = {"name": job.name, **namespace, "labels": _labels(job)}
    return {"apiVersion": version, "kind": kind, "metadata": metadata, **fields}


def _labels(job: PodJob) -> dict[str, str]:
    return {"app.kubernetes.io/name": "cputrain", "app.kubernetes.io/instance": job.name}


def _indexed_job(job: PodJob, backoff: int) -> Manifest:
    """Return the spec of an Indexed Job: failed pods restart, except after wrong input, which a restart cannot fix;
    evictions do not count."""
    rules = [
        {"action": "FailJob", "onExitCodes": {"operator": "In", "values": [int(ExitStatus.WRONG_INPUT)]}},
        {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
    ]
    return {
        "completions": job.pods,
        "parallelism": job.pods,
        "completionMode": "Indexed",
        "backoffLimit": backoff,
        "podFailurePolicy": {"rules": rules},
        **({} if job.limit_s is None else {"activeDeadlineSeconds": job.limit_s}),
        "template": {"metadata": {"labels": _labels(job)}, "spec": _pod(job)},
    }


def _jobset(job: PodJob) -> Manifest:
    """Return a JobSet, which restarts all pods after one fails."""
    spec = {
        "failurePolicy": {"maxRestarts": job.restarts},
        "network": {"enableDNSHostnames": True, "subdomain": job.name, "publishNotReadyAddresses": True},
        "replicatedJobs": [{"name": WORKERS, "replicas": 1, "template": {"spec": _indexed_job(job, 0)}}],
    }
    return _object(job, "jobset.x-k8s.io/v1alpha2", "JobSet", spec=spec)


def _mpijob(job: PodJob) -> Manifest:
    """Return an MPIJob: its launcher pod starts the ranks in the worker pods, which run sshd."""
    hosts = ("--hostfile", MPI_HOSTS, "--launcher", job.mpi, "--machine", f"pack:1 core:{job.cpus} pu:1")
    small = {"cpu": "1", "memory": "2Gi"}
    launcher = _container(job, "launcher", _shell(job, (*hosts, "--plan-on-host")), small)
    worker = _container(job, "worker", ("/usr/sbin/sshd", "-De"), _resources(job))
    spec = {
        "slotsPerWorker": job.ppn,
        "mpiImplementation": MPI[job.mpi],
        "runPolicy": {
            "cleanPodPolicy": "Running",
            "backoffLimit": job.restarts,
            **({} if job.limit_s is None else {"activeDeadlineSeconds": job.limit_s}),
        },
        "mpiReplicaSpecs": {
            "Launcher": {"replicas": 1, "template": {"spec": {"containers": [launcher], "volumes": _volumes(job)}}},
            "Worker": {
                "replicas": job.pods,
                "template": {"spec": {"containers": [worker], "volumes": _volumes(job)}},
            },
        },
    }
    return _object(job, "kubeflow.org/v2beta1", "MPIJob", spec=spec)


def _pod(job: PodJob) -> Manifest:
    """Return the pod's spec; the ranks meet at the first pod's name in the subdomain."""
    first = f"{job.name}-{WORKERS}-0-0" if job.kind == "jobset" else f"{job.name}-0"
    meeting = {COUNT: str(job.pods), "MASTER_ADDR": f"{first}.{job.name}", "MASTER_PORT": str(MASTER_PORT)}
    container = _container(job, "cputrain", _shell(job, ()), _resources(job))
    env = {**(meeting if job.pods > 1 else {}), "TQDM_MININTERVAL": "30"}
    secret = {"name": TOKEN_VARIABLE, "valueFrom": {"secretKeyRef": {"name": job.name, "key": TOKEN_KEY}}}
    container["env"] = [{"name": name, "value": value} for name, value in env.items()]
    container["env"] += [secret] if job.pods > 1 else []
    return {
        **({"subdomain": job.name} if job.pods > 1 else {}),
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": GRACE_S,
        "containers": [container],
        "volumes": _volumes(job),
    }


def _container(job: PodJob, name: str, command: tuple[str, ...], resources: dict[str, str]) -> Manifest:
    """Return a container whose requests equal its limits, which makes its pod Guaranteed."""
    mounts = [{"name": f"volume-{i}", "mountPath": path} for i, (_, path) in enumerate(job.volumes)]
    recipe = [] if job.recipe is None else [{"name": "recipe", "mountPath": RECIPE_FOLDER, "readOnly": True}]
    return {
        "name": name,
        "image": job.image,
        "command": [word.replace("$(", "$$(") for word in command],  # Kubernetes would expand $(NAME)
        **({"workingDir": job.volumes[0][1]} if job.volumes else {}),
        "resources": {"requests": resources, "limits": dict(resources)},
        "volumeMounts": [{"name": "shared-memory", "mountPath": "/dev/shm"}, *recipe, *mounts],
    }


def _resources(job: PodJob) -> dict[str, str]:
    return {"cpu": str(job.cpus), "memory": job.memory}


def _volumes(job: PodJob) -> list[Manifest]:
    """Return the claims, the recipe, and shared memory: a container's default of 64 MiB is too little for oneCCL and
    data loaders."""
    claims = [
        {"name": f"volume-{i}", "persistentVolumeClaim": {"claimName": claim}}
        for i, (claim, _) in enumerate(job.volumes)
    ]
    recipe = [] if job.recipe is None else [{"name": "recipe", "configMap": {"name": job.name}}]
    return [{"name": "shared-memory", "emptyDir": {"medium": "Memory"}}, *recipe, *claims]


def _shell(job: PodJob, hosts: tuple[str, ...]) -> tuple[str, ...]:
    """Return the container's command. A training resumes the run in its folder, as rank 0's pod decides."""
    launch = ("cputrain", "launch", *hosts, "--ppn", str(job.ppn), *job.launch, "--")
    if job.recipe is None or job.output is None:
        return (*launch, *job.command)
    output = shlex.quote(job.output)
    lines = (
        f"export {JOB}={shlex.quote(job.name)}",
        "resume=",
        f"if [ -e {output}/.cputrain-run ] && [ -e {output}/recipe.yaml ]; then",
        f"    resume=--resume; export {ATTEMPT}=1",
        "fi",
        f"exec {shlex.join((*launch, *job.command))} $resume",
    )
    return ("sh", "-c", "\n".join(lines))
