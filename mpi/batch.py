"""A training as a batch job -> the script that Slurm or PBS runs. Pure text: nothing is submitted here."""

import re
import shlex
from dataclasses import dataclass
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from affinity.errors import InputError
from mpi.fabric import Setting
from mpi.script import broken

# What may stand in a scheduler's own lines, which no shell quoting protects.
WORD = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.@:+-]*")
TIME = re.compile(r"(?:\d+-)?\d{1,3}(?::\d{2}){0,2}")
SCHEDULERS = ("slurm", "pbs")
LIMIT_NOTICE_S = 120  # between the notice that the time is up and the end of it: state is saved, the job requeued
SAVE_S = 90  # of it, for the step in progress and the checkpoint; ranks that take longer are ended
HOSTFILE = {"intelmpi": "$h:{ppn}", "mpich": "$h:{ppn}", "openmpi": "$h slots={ppn}"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """A training as a job. `recipe` is its whole text, `settings` what is set on top, `plan_options` how its plan is
    asked for; `launch` are mpirun's tokens up to its hostfile, none for srun. `data` is the folder of the images.

    `sweep` is a key and its values: one job of an array each. `stage` is a folder on every host that the data is
    copied to first.
    """

    name: str
    recipe: str
    settings: tuple[str, ...]
    output: str
    data: str | None
    nodes: int
    ppn: int
    pus_per_node: int
    time: str
    launcher: str
    launch: tuple[str, ...]
    plan_options: tuple[str, ...]
    fabric: tuple[Setting, ...]
    partition: str | None = None
    account: str | None = None
    modules: tuple[str, ...] = ()
    venv: str | None = None
    container: str | None = None
    stage: str | None = None
    sweep: tuple[str, tuple[str, ...]] | None = None


def job_script(batch: Batch, scheduler: str) -> str:
    """The script. Raises InputError where a value cannot stand in the scheduler's lines."""
    for what, value in (("--partition", batch.partition), ("--account", batch.account)):
        if value is not None and not WORD.fullmatch(value):
            raise InputError(f"{what} {value!r}: letters, digits and . @ : + - _ only")
    if not TIME.fullmatch(batch.time):
        raise InputError(f"--time {batch.time!r} is no limit: give HH:MM:SS, or D-HH:MM:SS")
    environment = Environment(
        loader=PackageLoader("mpi", "templates"),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,
    )
    environment.filters["q"] = shlex.quote
    template: Any = environment.get_template(f"{scheduler}.sh.j2")
    return str(
        template.render(
            batch=batch,
            name=re.sub(r"[^A-Za-z0-9_.-]", "-", batch.name).lstrip("-.") or "cputrain",
            delimiter=_delimiter(batch.recipe),
            launch=broken(batch.launch, 90),
            notice_s=LIMIT_NOTICE_S,
            save_s=SAVE_S,
            hostfile_line=HOSTFILE.get(batch.launcher, "$h").format(ppn=batch.ppn),
        )
    )


def _delimiter(text: str) -> str:
    """A word that is no line of a text, to end a here-document with."""
    lines, word = set(text.splitlines()), "END_OF_RECIPE"
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
