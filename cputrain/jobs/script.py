"""A training, an image preparation or any command as a batch job -> the script that Slurm or PBS runs.

Pure text: nothing is submitted here.
"""

import re
import shlex
from dataclasses import dataclass
from typing import Any, ClassVar

from jinja2 import Environment, PackageLoader, StrictUndefined

from affinity.errors import InputError
from cputrain.jobs.directives import Resources, directives

SAVE_S = 90  # of the notice, for the step in progress and the checkpoint; ranks that take longer are ended
RUNTIMES = ("apptainer", "singularity", "podman", "docker")
JOB_ID = {"slurm": "$SLURM_JOB_ID", "pbs": "${PBS_JOBID%%[!0-9]*}"}
ARRAY_ID = {"slurm": "$SLURM_ARRAY_TASK_ID", "pbs": "$PBS_ARRAY_INDEX"}
PATH_KEYS = ("data.path", "model.weights")  # of a recipe: what a job array may vary that has to be mounted, too


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """A recipe's training. `recipe` is its whole text, `settings` what is set on top, `plan_options` how its plan is
    asked for on the first host.

    `data` is the folder of the images, `stage` one on every host that they are copied to first. `sweep` is a key and
    its values: one job of an array each. `paths` are other files and folders that the recipe names.
    """

    kind: ClassVar[str] = "train"
    recipe: str
    settings: tuple[str, ...]
    output: str
    plan_options: tuple[str, ...]
    data: str | None = None
    stage: str | None = None
    sweep: tuple[str, tuple[str, ...]] | None = None
    paths: tuple[str, ...] = ()

    @property
    def mounted(self) -> tuple[str, ...]:
        """What a container needs beside the output's folder."""
        swept = self.sweep[1] if self.sweep is not None and self.sweep[0] in PATH_KEYS else ()
        return tuple(path for path in (self.data, self.stage, *self.paths, *swept) if path is not None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Preparation:
    """cputrain prepare: `arguments` are KIND, SRC, OUT and its options."""

    kind: ClassVar[str] = "prepare"
    arguments: tuple[str, ...]

    @property
    def mounted(self) -> tuple[str, ...]:
        """What a container needs beside the output's folder."""
        return (self.arguments[1],)

    @property
    def output(self) -> str:
        """The folder of the shards."""
        return self.arguments[2]


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """Any command, each rank of it bound by the plan. `request` is the JSON of how that is asked for on the first
    host."""

    kind: ClassVar[str] = "command"
    mounted: ClassVar[tuple[str, ...]] = ()
    argv: tuple[str, ...]
    request: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Container:
    """An image, the runtime that starts it ("auto": the first of RUNTIMES on PATH), and more options for that."""

    image: str
    runtime: str = "auto"
    arguments: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """A job: what it asks of the scheduler, what it runs, and where its programs come from.

    `machine` names the kind of host whose numbers the scheduler is told; None: everything is planned on the first host.
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


def job_script(batch: Batch, scheduler: str) -> str:
    """The script. Raises InputError where a value cannot stand in the scheduler's lines."""
    container = batch.container
    return _render(
        f"{scheduler}.sh.j2",
        batch=batch,
        work=batch.work,
        resources=batch.resources,
        directives=directives(batch.resources, scheduler),
        container=None if container is None else container_script(container, batch.work),
        left_behind=container is not None and _left_behind(container),
        job_id=JOB_ID[scheduler],
        array_id=ARRAY_ID[scheduler],
        delimiter=_delimiter,
        save_s=SAVE_S,
    )


def container_script(container: Container, work: Training | Preparation | Command) -> str:
    """The script that starts the container on a host, once for each rank, and in it the command that follows."""
    image = shlex.join((*container.arguments, container.image))
    return _render(
        "container.sh.j2", runtime=container.runtime, image=image, work=work, left_behind=_left_behind(container)
    )


def _left_behind(container: Container) -> bool:
    """Whether a killed rank may leave its container running, which is then not the rank's child."""
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
    """A word that is no line of a text, to end a here-document with."""
    lines = set(text.splitlines())
    while word in lines:
        word += "_"
    return word


def parse_sweep(text: str) -> tuple[str, tuple[str, ...]]:
    """ "batch.local=16,32" -> ("batch.local", ("16", "32")). Raises InputError on anything else."""
    key, equals, values = text.partition("=")
    parts = tuple(value.strip() for value in values.split(","))
    if not equals or not re.fullmatch(r"[a-z_]+(\.[a-z_]+)*", key) or not all(parts):
        raise InputError(f"--array {text!r} is not KEY=VALUE,VALUE..., as in batch.local=16,32")
    return key, parts
