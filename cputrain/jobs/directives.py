"""What a scheduler is told of a job -> the lines that it reads at the head of the script."""

import re
from dataclasses import dataclass

from affinity.errors import InputError

# No shell quoting protects these lines: what may stand in them is said here, in full.
WORD = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.@:+-]*")
FEATURES = re.compile(r"[A-Za-z0-9_(\[][A-Za-z0-9_.,:&|*!()\[\]+=-]*")
ADDRESS = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+-]*(@[A-Za-z0-9_.-]+)?")
FILE = re.compile(r"[A-Za-z0-9_./~%][A-Za-z0-9_./~%@:+=^-]*")
TIME = {"slurm": re.compile(r"(?:\d+-)?\d{1,3}(?::\d{2}){0,2}"), "pbs": re.compile(r"\d{1,4}(?::\d{2}){1,2}")}
SCHEDULERS = tuple(TIME)
LIMIT_NOTICE_S = 120  # between the notice that the time is up and the end of it: state is saved, the job requeued


@dataclass(frozen=True, slots=True, kw_only=True)
class Resources:
    """What a job asks of its scheduler, by the names of `cputrain job`'s options.

    `ppn` and `cpus` are tasks and CPUs of each host where they are known beforehand. `tasks` is the length of a job
    array, 0 for a single job. With `requeue` the job is queued again at its time limit and after a host's failure.
    `directives` are lines of the scheduler's own, which come last and win.
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
    def word(self) -> str:
        """The job's name as a scheduler and a file system take it, 64 characters at most."""
        return re.sub(r"[^A-Za-z0-9_.-]", "-", self.name).lstrip("-.")[:64] or "cputrain"


def directives(asked: Resources, scheduler: str) -> tuple[str, ...]:
    """The scheduler's lines, each with its #. Raises InputError for what cannot stand in them."""
    _check(asked, scheduler)
    sign, lines = ("#SBATCH", _slurm(asked)) if scheduler == "slurm" else ("#PBS", _pbs(asked))
    return tuple(f"{sign} {line}" for line in (*lines, *asked.directives))


def _slurm(asked: Resources) -> tuple[str, ...]:
    number = "%A_%a" if asked.tasks else "%j"
    return (
        f"--job-name={asked.word}",
        f"--nodes={asked.nodes}",
        *_given("--ntasks-per-node=", asked.ppn),
        *_given("--cpus-per-task=", asked.cpus and asked.ppn and asked.cpus // asked.ppn),
        "--exclusive",
        "--mem=0",  # --exclusive lends all of a host's CPUs, but only this all of its memory
        f"--time={asked.time}",
        *_given("--partition=", asked.partition),
        *_given("--account=", asked.account),
        *_given("--qos=", asked.qos),
        *_given("--constraint=", asked.constraint),
        *((f"--mail-user={asked.mail}", "--mail-type=END,FAIL") if asked.mail else ()),
        *((f"--array=0-{asked.tasks - 1}",) if asked.tasks else ()),
        *((f"--signal=B:USR1@{LIMIT_NOTICE_S}", "--requeue") if asked.requeue else ("--no-requeue",)),
        "--open-mode=append",
        f"--output={asked.output or f'{asked.word}-{number}.out'}",
        *_given("--error=", asked.error),
    )


def _pbs(asked: Resources) -> tuple[str, ...]:
    mpiprocs = "" if asked.ppn is None else f":mpiprocs={asked.ppn}"
    return (
        f"-N {asked.word[:15]}",
        "-S /bin/bash",
        f"-l select={asked.nodes}:ncpus={asked.cpus}{mpiprocs}",
        "-l place=scatter:excl",
        f"-l walltime={asked.time}",
        *_given("-q ", asked.queue),
        *_given("-A ", asked.account),
        *((f"-M {asked.mail}", "-m ae") if asked.mail else ()),
        *((f"-J 0-{asked.tasks - 1}",) if asked.tasks else ()),
        *_given("-o ", asked.output),
        *((f"-e {asked.error}",) if asked.error else ("-j oe",)),
        f"-r {'y' if asked.requeue else 'n'}",
    )


def _given(option: str, value: str | int | None) -> tuple[str, ...]:
    return () if value is None else (f"{option}{value}",)


def _check(asked: Resources, scheduler: str) -> None:
    for what, pattern, known in (
        ("partition", WORD, "letters, digits and . @ : + - _ only"),
        ("queue", WORD, "letters, digits and . @ : + - _ only"),
        ("account", WORD, "letters, digits and . @ : + - _ only"),
        ("qos", WORD, "letters, digits and . @ : + - _ only"),
        ("constraint", FEATURES, "names of features with & | , * ! ( ) [ ] between them, no spaces"),
        ("mail", ADDRESS, "one address, as in me@example.org"),
        ("output", FILE, "letters, digits and / . _ - + = @ : ~ ^ % only"),
        ("error", FILE, "letters, digits and / . _ - + = @ : ~ ^ % only"),
    ):
        value = getattr(asked, what)
        if value is not None and not pattern.fullmatch(value):
            raise InputError(f"--{what} {value!r}: {known}")
    for what in ("output", "error"):
        if re.match(r"([^/]*:)?~", getattr(asked, what) or ""):
            raise InputError(f"--{what} {getattr(asked, what)}: no scheduler expands ~: write the folder in full")
    if not TIME[scheduler].fullmatch(asked.time):
        days = ", or D-HH:MM:SS" if scheduler == "slurm" else ", with days as hours"
        raise InputError(f"--time {asked.time!r} is no limit: give HH:MM:SS{days}")
    for line in asked.directives:
        if not line.startswith("-") or not line.isprintable():
            raise InputError(
                f"--directive {line!r}: one line of the scheduler's own, as it stands after #SBATCH or #PBS"
            )
    if scheduler == "pbs" and asked.cpus is None:
        raise InputError(
            "PBS must be told the CPUs of a host: name it with --machine, or give --ncpus N, as pbsnodes -a shows it"
        )
