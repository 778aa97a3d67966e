"""A job's resources -> the scheduler's directives at the head of the script."""

import re
from dataclasses import dataclass

from affinity.errors import InputError
from mpi.supervise.signals import SAVE_S

# No shell quoting protects these lines, so the allowed characters are listed in full.
WORD = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.@:+-]*")
FEATURES = re.compile(r"[A-Za-z0-9_(\[][A-Za-z0-9_.,:&|*!()\[\]+=-]*")
ADDRESS = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+-]*(@[A-Za-z0-9_.-]+)?")
FILE = re.compile(r"[A-Za-z0-9_./~%][A-Za-z0-9_./~%@:+=^-]*")
TIME = {
    "slurm": re.compile("(?:[0-9]{1,4}-)?[0-9]{1,3}(?::[0-9]{2}){0,2}"),
    "pbs": re.compile("[0-9]{1,4}(?::[0-9]{2}){1,2}"),
}
SCHEDULERS = tuple(TIME)
LIMIT_NOTICE_S = round(SAVE_S) + 30  # from the preemption signal to the time limit: state is saved, the job requeued


@dataclass(frozen=True, slots=True, kw_only=True)
class Resources:
    """What a job requests of its scheduler, named like the options of `cputrain job`.

    `ppn` and `cpus` are tasks and CPUs per host, where they are known beforehand. `tasks` is the length of a job array,
    0 for a single job. With `requeue` the job is queued again at its time limit and after a host's failure.
    `directives` are further lines for the scheduler, which come last and take precedence.
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
        """The job's name in characters that schedulers and file systems accept, 64 at most."""
        return re.sub(r"[^A-Za-z0-9_.-]", "-", self.name).lstrip("-.")[:64] or "cputrain"


def directives(job: Resources, scheduler: str) -> tuple[str, ...]:
    """The directives, as #SBATCH or #PBS lines. Raises InputError for values that such a line cannot hold."""
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
        "--mem=0",  # --exclusive gives the job all of a host's CPUs; all of its memory needs this
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
    for what, pattern, known in (
        ("partition", WORD, "use only letters, digits and . @ : + - _"),
        ("queue", WORD, "use only letters, digits and . @ : + - _"),
        ("account", WORD, "use only letters, digits and . @ : + - _"),
        ("qos", WORD, "use only letters, digits and . @ : + - _"),
        ("constraint", FEATURES, "give names of features joined by & | , * ! ( ) [ ], without spaces"),
        ("mail", ADDRESS, "give one address, as in me@example.org"),
        ("output", FILE, "use only letters, digits and / . _ - + = @ : ~ ^ %"),
        ("error", FILE, "use only letters, digits and / . _ - + = @ : ~ ^ %"),
    ):
        value = getattr(job, what)
        if value is not None and not pattern.fullmatch(value):
            raise InputError(f"--{what} {value!r}: {known}")
    for what in ("output", "error"):
        if re.match(r"([^/]*:)?~", getattr(job, what) or ""):
            raise InputError(f"--{what} {getattr(job, what)}: schedulers do not expand ~: write the folder in full")
    if not TIME[scheduler].fullmatch(job.time):
        days = ", or D-HH:MM:SS" if scheduler == "slurm" else ", with days as hours"
        raise InputError(f"--time {job.time[:60]!r} is not a time limit: give HH:MM:SS{days}")
    for line in job.directives:
        if not line.startswith("-") or not line.isprintable():
            raise InputError(f"--directive {line!r}: give one directive as it stands after #SBATCH or #PBS")
    if scheduler == "pbs" and job.cpus is None:
        raise InputError(
            "PBS needs the CPUs per host: name the machine with --machine, or give --ncpus N as in pbsnodes -a"
        )
