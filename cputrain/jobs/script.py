"""Job scripts for Slurm and PBS: directives, work, rendering and submission."""

import json
import re
import shlex
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar

from jinja2 import Environment, PackageLoader, StrictUndefined

from cputrain.affinity.errors import InputError, RunError
from cputrain.affinity.planner.request import CPUS, JOB_OPTIONS, Request
from cputrain.affinity.rank import ENV, PBS, PREFIXES, SLURM
from cputrain.affinity.topology.catalog import find_machine
from cputrain.launch.options import THIS_MACHINE, PlanningOptions, plan_host, request_of_options
from cputrain.mpi.supervise.signals import SAVE_S

# These lines cannot be quoted for a shell, so the permitted characters are listed explicitly.
WORD = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.@:+-]*")
FEATURES = re.compile(r"[A-Za-z0-9_(\[][A-Za-z0-9_.,:&|*!()\[\]+=-]*")
ADDRESS = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+-]*(@[A-Za-z0-9_.-]+)?")
FILE = re.compile(r"[A-Za-z0-9_./~%][A-Za-z0-9_./~%@:+=^-]*")
VALUES = {
    **dict.fromkeys(("partition", "queue", "account", "qos"), (WORD, "use only letters, digits and . @ : + - _")),
    "constraint": (FEATURES, "give names of features joined by & | , * ! ( ) [ ], without spaces"),
    "mail": (ADDRESS, "give one address, as in me@example.org"),
    **dict.fromkeys(("output", "error"), (FILE, "use only letters, digits and / . _ - + = @ : ~ ^ %")),
}
"""Pattern of each option's value, and advice for a value that does not match."""
TIME = {
    "slurm": re.compile("(?:[0-9]{1,4}-)?[0-9]{1,3}(?::[0-9]{2}){0,2}"),
    "pbs": re.compile("[0-9]{1,4}(?::[0-9]{2}){1,2}"),
}
SCHEDULERS = tuple(TIME)
LIMIT_NOTICE_S = round(SAVE_S) + 30  # from the preemption signal to the time limit, to save and requeue
RUNTIMES = ("apptainer", "singularity", "podman", "docker")
JOB_ID = {"slurm": f"${SLURM.job_variable}", "pbs": f"${{{PBS.job_variable}%%[!0-9]*}}"}
ARRAY_ID = {"slurm": "$SLURM_ARRAY_TASK_ID", "pbs": "$PBS_ARRAY_INDEX"}
PATH_KEYS = ("data.path", "model.weights")  # recipe keys whose values in a job array must be mounted, too
SUBMIT = {"slurm": ("sbatch", "--parsable"), "pbs": ("qsub",)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Resources:
    """Resources that a job requests of its scheduler, named like the options of `cputrain job`.

    `ppn` and `cpus` are tasks and CPUs per host if known in advance. `tasks` is the length of a job array, 0 for a
    single job. With `requeue` the job is requeued at its time limit and after a host fails. `directives` are additional
    lines for the scheduler, which come last and take precedence.
    """

    name: str
    nodes: int
    time: str
    ppn: int | None = None
    cpus: int | None = None
    requeue: bool = True
    tasks: int = 0
    partition: str | None = None
    queue: str | None = None
    account: str | None = None
    qos: str | None = None
    constraint: str | None = None
    mail: str | None = None
    output: str | None = None
    error: str | None = None
    directives: tuple[str, ...] = ()

    @property
    def safe_name(self) -> str:
        """The job's name with only characters that schedulers and file systems accept, at most 64."""
        return re.sub(r"[^A-Za-z0-9_.-]", "-", self.name).lstrip("-.")[:64] or "cputrain"


def directives(job: Resources, scheduler: str) -> tuple[str, ...]:
    """Return #SBATCH or #PBS lines. Raises InputError for values that such a line cannot contain."""
    _check(job, scheduler)
    sign, lines = ("#SBATCH", _slurm(job)) if scheduler == "slurm" else ("#PBS", _pbs(job))
    return tuple(f"{sign} {line}" for line in (*lines, *job.directives))


def _slurm(job: Resources) -> tuple[str, ...]:
    number = "%A_%a" if job.tasks else "%j"
    return (
        f"--job-name={job.safe_name}",
        f"--nodes={job.nodes}",
        *_given("--ntasks-per-node=", job.ppn),
        *_given("--cpus-per-task=", job.cpus and job.ppn and job.cpus // job.ppn),
        "--exclusive",
        "--mem=0",  # all of a host's memory: --exclusive covers only its CPUs
        f"--time={job.time}",
        *_given("--partition=", job.partition),
        *_given("--account=", job.account),
        *_given("--qos=", job.qos),
        *_given("--constraint=", job.constraint),
        *((f"--mail-user={job.mail}", "--mail-type=END,FAIL") if job.mail else ()),
        *((f"--array=0-{job.tasks - 1}",) if job.tasks else ()),
        *((f"--signal=B:USR1@{LIMIT_NOTICE_S}", "--requeue") if job.requeue else ("--no-requeue",)),
        "--open-mode=append",
        f"--output={job.output or f'{job.safe_name}-{number}.out'}",
        *_given("--error=", job.error),
    )


def _pbs(job: Resources) -> tuple[str, ...]:
    mpiprocs = "" if job.ppn is None else f":mpiprocs={job.ppn}"
    return (
        f"-N {job.safe_name[:15]}",
        "-S /bin/bash",
        f"-l select={job.nodes}:ncpus={job.cpus}{mpiprocs}",
        "-l place=scatter:excl",
        f"-l walltime={job.time}",
        *_given("-q ", job.queue),
        *_given("-A ", job.account),
        *((f"-M {job.mail}", "-m ae") if job.mail else ()),
        *((f"-J 0-{job.tasks - 1}",) if job.tasks else ()),
        *_given("-o ", job.output),
        *((f"-e {job.error}",) if job.error else ("-j oe",)),
        f"-r {'y' if job.requeue else 'n'}",
    )


def _given(option: str, value: str | int | None) -> tuple[str, ...]:
    return () if value is None else (f"{option}{value}",)


def _check(job: Resources, scheduler: str) -> None:
    for what, (pattern, known) in VALUES.items():
        value = getattr(job, what)
        if value is not None and not pattern.fullmatch(value):
            raise InputError(f"--{what} {value!r} is invalid: {known}")
    for what in ("output", "error"):
        if re.match(r"([^/]*:)?~", getattr(job, what) or ""):
            raise InputError(f"--{what} {getattr(job, what)} has a ~ that is not expanded: write the folder in full")
    if not TIME[scheduler].fullmatch(job.time):
        days = ", or D-HH:MM:SS" if scheduler == "slurm" else ", with days as hours"
        raise InputError(f"--time {job.time[:60]!r} is not a time limit: give HH:MM:SS{days}")
    for line in job.directives:
        if not line.startswith("-") or not line.isprintable():
            raise InputError(f"--directive {line!r} is invalid: give one directive as it follows #SBATCH or #PBS")
    if scheduler == "pbs" and job.cpus is None:
        raise InputError(
            "PBS needs the CPUs per host: give the machine with --machine, or --ncpus N as shown by pbsnodes -a"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """Training of a recipe. `recipe` is its full text, `settings` override it, `plan_options` are the options of
    `cputrain plan` on the first host.

    `data` is the folder of the images, `stage` a folder on every host to which they are copied first. `array` is a key
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
        """Paths that a container needs in addition to the output folder."""
        varied = self.array[1] if self.array is not None and self.array[0] in PATH_KEYS else ()
        return tuple(path for path in (self.data, self.stage, *self.paths, *varied) if path is not None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Preparation:
    """Image preparation; `arguments` are KIND, SRC, OUT and the options of `cputrain prepare`."""

    kind: ClassVar[str] = "prepare"
    arguments: tuple[str, ...]

    @property
    def mounted(self) -> tuple[str, ...]:
        """Paths that a container needs in addition to the output folder."""
        return (self.arguments[1],)

    @property
    def output(self) -> str:
        """The folder of the shards."""
        return self.arguments[2]


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """Any command, each rank bound by the plan. `request` is the planner's request in JSON, for the first host."""

    kind: ClassVar[str] = "command"
    mounted: ClassVar[tuple[str, ...]] = ()
    argv: tuple[str, ...]
    request: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Container:
    """A container image, the program that runs it ("auto": the first of RUNTIMES on PATH), and additional options."""

    image: str
    runtime: str = "auto"
    arguments: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchJob:
    """A batch job: the resources it requests, what it runs, and the environment of its programs.

    `machine` is the machine for which tasks and CPUs are requested; None: they are planned on the first host.
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
    """Return the job script. Raises InputError for values that a directive cannot contain."""
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
    """Return the script that starts the container on a host, once for each rank, with the rank's command inside."""
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
    """Return whether the container may keep running after its rank was killed, as it is not the rank's child."""
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
    """Return a delimiter for a here-document that is not a line of its text."""
    lines = set(text.splitlines())
    while word in lines:
        word += "_"
    return word


def parse_array(text: str) -> tuple[str, tuple[str, ...]]:
    """Parse "batch.local=16,32" into ("batch.local", ("16", "32")). Raises InputError on anything else."""
    key, equals, values = text.partition("=")
    parts = tuple(value.strip() for value in values.split(","))
    if not equals or not re.fullmatch(r"[a-z_]+(\.[a-z_]+)*", key) or not all(parts):
        raise InputError(f"--array {text[:100]!r} is not KEY=VALUE,VALUE..., as in batch.local=16,32")
    return key, parts


def submit(script: str, scheduler: str, chain: int) -> Iterator[str]:
    """Submit the script `chain` times, each job to start after the previous one has ended; yield the job IDs.

    Raises InputError if the scheduler's command is missing, RunError if it rejects the job.
    """
    before: str | None = None
    for _ in range(chain):
        argv = [*SUBMIT[scheduler], *(_after(before, scheduler) if before is not None else ())]
        try:
            done = subprocess.run(
                argv, input=script, capture_output=True, encoding="utf-8", errors="surrogateescape", check=False
            )
        except FileNotFoundError:
            raise InputError(f"--submit needs {argv[0]} on PATH: run this on a host of the cluster") from None
        if done.returncode:
            raise RunError(f"{argv[0]} rejected the job: {' '.join(done.stderr.split())}")
        before = done.stdout.strip().partition(";")[0]
        yield before


def _after(job_id: str, scheduler: str) -> tuple[str, str]:
    if scheduler == "slurm":
        return "--dependency", f"afterany:{job_id}"
    return "-W", f"depend=afterany:{job_id}"


@dataclass(frozen=True, slots=True, kw_only=True)
class SizedWork:
    """What a job runs, its default name, and the tasks and CPUs per host; None: known only when the job runs. `note` is
    for the user, "" if there is none."""

    work: Training | Preparation | Command
    name: str
    ppn: int | None
    cpus: int | None
    note: str = ""


def preparation_work(options: PlanningOptions, arguments: tuple[str, ...]) -> SizedWork:
    """Return an image preparation; `arguments` are KIND, SRC, OUT and the options of `cputrain prepare`."""
    given = [name for name, value in options.given.items() if value is not None]
    given += [name for name in ("fabric", "launcher") if getattr(options, name) != "auto"]
    if given or len(options.hosts) > 1:
        option = given[0].replace("_", "-") if given else "nodes"
        raise InputError(
            f"--{option} does not apply to prepare, one process on one host with all its cores: remove --{option}"
        )
    return SizedWork(
        work=Preparation(arguments=arguments),
        name=f"prepare-{Path(arguments[2]).name}",
        ppn=1,
        cpus=len(find_machine(options.machine).allowed_pus) if options.machine != THIS_MACHINE else None,
    )


def in_job(argv: tuple[str, ...]) -> tuple[str, ...]:
    """Return a command as a job runs it: .py files run in the python that is first on PATH there."""
    return ("python", *argv) if argv[0].endswith(".py") else argv


def command_work(options: PlanningOptions, argv: tuple[str, ...], env: Mapping[str, str]) -> SizedWork:
    """Return any command as work, planned as by `cputrain launch`."""
    argv = in_job(argv)
    base = Request(pin_threads=False)  # loader processes that a script starts must not share one PU
    ppn, cpus = tasks_and_cpus(options, base, env)
    default = asdict(Request())
    requested = {**asdict(request_of_options(options, base)), "ppn": ppn}
    of_network = ("fabric", "link_gbit")  # as on the job's first host, which may have another network than this one
    fields = {name: value for name, value in requested.items() if value != default[name] and name not in of_network}
    if options.given["link_gbit"] is not None:
        fields["link_gbit"] = options.given["link_gbit"]
    scripts = (word for word in argv if word.endswith((".py", ".sh")) and len(word.split()) == 1)  # skips sh -c's text
    name = Path(next(scripts, argv[0])).stem
    return SizedWork(work=Command(argv=argv, request=json.dumps(fields)), name=name, ppn=ppn, cpus=cpus)


def planning_words(
    options: PlanningOptions, plan: Mapping[str, object], local_batch: int | None = None
) -> tuple[str, ...]:
    """Return the options, completed by the keys of a recipe's plan section, as options of `cputrain launch` without
    --ppn; `local_batch` is the recipe's."""
    found = []
    for option in JOB_OPTIONS:
        value = options.given[option.name]
        if value is None:
            value = plan.get(option.name)
        if option.kind != CPUS and value not in (None, option.default):
            found += [option.flag, str(value)]
    batch = options.given["local_batch"]
    if plan.get("balance") == "batch":
        batch = local_batch  # the batch that is divided in proportion to cores
    if batch is not None:
        found += ["--local-batch", str(batch)]
    found += link_words(options)
    if options.fabric != "auto":
        found += ["--fabric", options.fabric]
    return tuple(found)


def link_words(options: PlanningOptions) -> tuple[str, ...]:
    """Return --link-gbit, if it is given, as words."""
    gbit = options.given["link_gbit"]
    return () if gbit is None else ("--link-gbit", f"{gbit:g}")


def tasks_and_cpus(options: PlanningOptions, base: Request, env: Mapping[str, str]) -> tuple[int | None, int | None]:
    """Return workers and CPUs per host of the named machine; without one only requested workers are known."""
    if options.machine == THIS_MACHINE:
        return request_of_options(options, base).ppn, None
    plan = plan_host(options, base, env)
    return len(plan.workers), len(plan.machine.allowed_pus)
