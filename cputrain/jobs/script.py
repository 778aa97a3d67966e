"""A training, an image preparation or any command -> the script that Slurm or PBS runs."""

import re
import shlex
from dataclasses import dataclass
from typing import Any, ClassVar

from jinja2 import Environment, PackageLoader, StrictUndefined

from affinity.errors import InputError
from affinity.ranks.launcher_variables import ENV, PBS, PREFIXES, SLURM
from cputrain.jobs.directives import Resources, directives
from mpi.supervise.signals import SAVE_S

RUNTIMES = ("apptainer", "singularity", "podman", "docker")
JOB_ID = {"slurm": f"${SLURM.job_variable}", "pbs": f"${{{PBS.job_variable}%%[!0-9]*}}"}
ARRAY_ID = {"slurm": "$SLURM_ARRAY_TASK_ID", "pbs": "$PBS_ARRAY_INDEX"}
PATH_KEYS = ("data.path", "model.weights")  # recipe keys whose values in a job array have to be mounted, too


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """A recipe's training. `recipe` is its whole text, `settings` override it, `plan_options` are those of the
    `cputrain plan` that the first host runs.

    `data` is the folder of the images, `stage` a folder on every host that they are copied to first. `array` is a key
    and its values, one for each job of an array. `paths` are other files and folders that the recipe names.
    """

    kind: ClassVar[str] = "train"
    recipe: str
    settings: tuple[str, ...]
    output: str
    plan_options: tuple[str, ...]
    data: str | None = None
    stage: str | None = None
    array: tuple[str, tuple[str, ...]] | None = None
    paths: tuple[str, ...] = ()

    @property
    def mounted(self) -> tuple[str, ...]:
        """Paths that a container needs in addition to the output's folder."""
        varied = self.array[1] if self.array is not None and self.array[0] in PATH_KEYS else ()
        return tuple(path for path in (self.data, self.stage, *self.paths, *varied) if path is not None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Preparation:
    """An image preparation; `arguments` are KIND, SRC, OUT and the options of `cputrain prepare`."""

    kind: ClassVar[str] = "prepare"
    arguments: tuple[str, ...]

    @property
    def mounted(self) -> tuple[str, ...]:
        """Paths that a container needs in addition to the output's folder."""
        return (self.arguments[1],)

    @property
    def output(self) -> str:
        """The folder of the shards."""
        return self.arguments[2]


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """Any command, each rank bound by the plan. `request` is the planner's request as JSON, for the first host."""

    kind: ClassVar[str] = "command"
    mounted: ClassVar[tuple[str, ...]] = ()
    argv: tuple[str, ...]
    request: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Container:
    """An image, the program that starts it ("auto": the first of RUNTIMES on PATH), and further options."""

    image: str
    runtime: str = "auto"
    arguments: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchJob:
    """A job: the resources it requests, what it runs, and where its programs come from.

    `machine` names the machine that the requested tasks and CPUs belong to; None: they are planned on the first host.
    """

    resources: Resources
    work: Training | Preparation | Command
    launcher: str
    fabric: str = "auto"
    machine: str | None = None
    modules: tuple[str, ...] = ()
    module_purge: bool = False
    venv: str | None = None
    container: Container | None = None


def job_script(job: BatchJob, scheduler: str) -> str:
    """The script. Raises InputError for values that a directive cannot hold."""
    container = job.container
    return _render(
        f"{scheduler}.sh.j2",
        job=job,
        work=job.work,
        resources=job.resources,
        directives=directives(job.resources, scheduler),
        container=None if container is None else container_script(container, job.work),
        may_outlive_rank=container is not None and _may_outlive_rank(container),
        job_id=JOB_ID[scheduler],
        array_id=ARRAY_ID[scheduler],
        delimiter=_delimiter,
        save_s=round(SAVE_S),
    )


def container_script(container: Container, work: Training | Preparation | Command) -> str:
    """The script that starts the container on a host, once for each rank, with the rank's command inside."""
    image = shlex.join((*container.arguments, container.image))
    return _render(
        "container.sh.j2",
        runtime=container.runtime,
        image=image,
        work=work,
        may_outlive_rank=_may_outlive_rank(container),
        job_id=f"${{{SLURM.job_variable}:-${{{PBS.job_variable}:-none}}}}",
        launcher_variables=" | ".join(f"{prefix}*" for prefix in PREFIXES),
        rank_variables=" | ".join(ENV.rank_names),
    )


def _may_outlive_rank(container: Container) -> bool:
    """Whether the container may go on running after its rank was killed, as it is not the rank's child."""
    return container.runtime in ("auto", "podman", "docker")


def _render(name: str, **values: Any) -> str:
    environment = Environment(
        loader=PackageLoader("cputrain.jobs", "templates"),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,
    )
    environment.filters["q"] = shlex.quote
    return str(environment.get_template(name).render(values))


def _delimiter(text: str, word: str) -> str:
    """A word that is not a line of the text, to end a here-document with."""
    lines = set(text.splitlines())
    while word in lines:
        word += "_"
    return word


def parse_array(text: str) -> tuple[str, tuple[str, ...]]:
    """ "batch.local=16,32" -> ("batch.local", ("16", "32")). Raises InputError on anything else."""
    key, equals, values = text.partition("=")
    parts = tuple(value.strip() for value in values.split(","))
    if not equals or not re.fullmatch(r"[a-z_]+(\.[a-z_]+)*", key) or not all(parts):
        raise InputError(f"--array {text[:100]!r} is not KEY=VALUE,VALUE..., as in batch.local=16,32")
    return key, parts
