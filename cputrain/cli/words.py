"""Names of commands, options and settings: what was meant, and groups in --help."""

from collections.abc import Callable, Iterable
from difflib import get_close_matches

import click

from cputrain.affinity.errors import Wording, as_option
from cputrain.affinity.wording import either

RECIPE_COMMANDS = ("train", "eval", "sweep", "reproduce", "bench", "tune", "find-lr")  # the others have options
KEYS = {"local_batch": "batch.local"}


def as_recipe_key(name: str, value: str | None) -> str:
    """A setting as a recipe has it: plan.ppn, plan.oversubscribe=true; --no-verify, which is no key."""
    if name == "verify":
        return as_option(name, value)
    key = KEYS.get(name, f"plan.{name}")
    return key if value is None else f"{key}={value}"


def as_option_or_key(name: str, value: str | None) -> str:
    """A setting of a command that may have a recipe, whose batch is a key and no option."""
    return "--local-batch (with a recipe: batch.local)" if name == "local_batch" else as_option(name, value)


def wording_of(arguments: list[str]) -> Wording:
    """How the command with these arguments names settings."""
    return as_recipe_key if arguments and arguments[0] in RECIPE_COMMANDS else as_option_or_key


# Names that people try -> commands.
COMMAND_MEANINGS = {
    "accelerate": ("import",),
    "autotune": ("tune",),
    "benchmark": ("bench",),
    "check": ("doctor",),
    "classify": ("predict",),
    "compare": ("report",),
    "config": ("keys", "recipes"),
    "configs": ("recipes",),
    "convert": ("prepare", "export"),
    "dataset": ("data", "prepare"),
    "diagnose": ("doctor",),
    "debug": ("doctor", "env"),
    "deepspeed": ("import",),
    "download": ("weights",),
    "examples": ("demo", "recipes"),
    "estimate": ("simulate",),
    "evaluate": ("eval",),
    "exec": ("launch",),
    "fit": ("train",),
    "grid": ("sweep",),
    "help": ("--help",),
    "horovodrun": ("import",),
    "hpo": ("sweep",),
    "infer": ("predict", "eval"),
    "inference": ("predict", "eval"),
    "info": ("env", "plan"),
    "ipexrun": ("import",),
    "k8s": ("job kubernetes",),
    "kubernetes": ("job kubernetes",),
    "list": ("recipes", "machines"),
    "logs": ("watch",),
    "lr-find": ("find-lr",),
    "lr-finder": ("find-lr",),
    "ls": ("recipes", "machines"),
    "lscpu": ("plan", "machine"),
    "lstopo": ("plan", "machine"),
    "models": ("recipes", "weights"),
    "monitor": ("watch",),
    "mpiexec": ("import", "launch"),
    "mpirun": ("import", "launch"),
    "onnx": ("export",),
    "optimize": ("tune",),
    "options": ("keys",),
    "pack": ("prepare",),
    "pbs": ("job",),
    "plot": ("report",),
    "preprocess": ("prepare",),
    "profile": ("bench", "report"),
    "resume": ("train RUN --resume",),
    "run": ("launch", "train"),
    "save": ("export", "machine"),
    "sbatch": ("job",),
    "scale": ("simulate",),
    "search": ("sweep", "tune"),
    "slurm": ("job",),
    "srun": ("import", "launch"),
    "start": ("launch", "train"),
    "status": ("watch",),
    "submit": ("job",),
    "tensorboard": ("report", "watch"),
    "test": ("eval",),
    "top": ("watch",),
    "topology": ("plan", "machine"),
    "torchrun": ("import", "launch"),
    "val": ("eval",),
    "validate": ("eval",),
    "version": ("--version",),
    "visualize": ("report",),
}
# Options that people try -> options, for the commands that have them.
OPTION_MEANINGS = {
    "batch": ("--local-batch",),
    "batch-size": ("--local-batch",),
    "bs": ("--local-batch",),
    "ckpt": ("--checkpoint", "--resume"),
    "core-list": ("--cores",),
    "cpu-list": ("--cores",),
    "cpus": ("--cores", "--threads", "--ncpus"),
    "cpus-per-task": ("--threads",),
    "devices": ("--ppn",),
    "dryrun": ("--dry-run",),
    "force": ("--overwrite",),
    "gpus": ("--ppn",),
    "gpus-per-node": ("--ppn",),
    "image": ("--container",),
    "json": ("--format json",),
    "load": ("--checkpoint", "--resume"),
    "memory-allocator": ("--allocator",),
    "n": ("--ppn", "--nodes"),
    "np": ("--ppn",),
    "nproc": ("--ppn",),
    "nproc-per-node": ("--ppn",),
    "nprocs-per-node": ("--ppn",),
    "ntasks": ("--ppn",),
    "ntasks-per-node": ("--ppn",),
    "num-gpus": ("--ppn",),
    "num-processes": ("--ppn",),
    "num-threads": ("--threads",),
    "num-workers": ("--loader-cores",),
    "omp-num-threads": ("--threads",),
    "omp-runtime": ("--openmp",),
    "out": ("--output",),
    "output-dir": ("--output",),
    "preview": ("--dry-run",),
    "processes": ("--ppn",),
    "replicas": ("--nodes", "--ppn"),
    "resume-from": ("--resume", "--checkpoint"),
    "retries": ("--restarts",),
    "save-dir": ("--output",),
    "silent": ("--quiet",),
    "svg": ("--format svg",),
    "tasks-per-node": ("--ppn",),
    "verbose": ("--explain",),
    "walltime": ("--time",),
    "workers": ("--ppn", "--loader-cores"),
    "yaml": ("--format yaml",),
    "yes": ("--overwrite",),
}
RUN = "give the folder that a training has written"
# Arguments that commands need, as they are shown or by name -> what tells their values.
ARGUMENTS = {
    "recipe": "cputrain recipes lists those included",
    "cmd": "give a program, as in cputrain launch x.py",
    "words": 'give a command line, as in cputrain import "torchrun x.py"',
    "kind": "cputrain prepare --help lists the kinds",
    "folder": "give a folder of images or of prepared data",
    "machine": "cputrain machines lists them",
    "scheduler": "give slurm, pbs or kubernetes",
    "run": RUN,
    "runs": RUN,
    "cpus": "give the whole CPUs of each pod, as in --cpus 16",
    "memory": "give the memory of each pod, as in --memory 64Gi",
    "image": "give the container's image, as in --image registry.example.org/cputrain:0.1.0",
    "checkpoint": RUN,
    "time": "give the longest duration, as in --time 2:00:00",
    "text": "give what to look for, as in resnet50 or icelake",
    "network": "give a network of torchvision, as in resnet50",
    "paths": "give images, or folders of them",
    "source": "give a folder or an archive of images, and OUT, a new folder",
    "out": "give a new folder",
    "RECIPE|RUN|CHECKPOINT": f"{RUN}, or one of its checkpoints; a recipe needs --checkpoint",
}
# How other launchers call the binding of ranks.
BINDING = ("bind-to", "binding", "cpu-bind", "map-by", "no-bind", "pin", "rank-by", "bind-to-core", "bind-to-none")
BOUND = (
    "the plan binds each rank to cores of its own, which cputrain plan shows. --bind launcher leaves that to the "
    "launcher; none is not offered, but --ppn 1 gives one rank all cores."
)


def no_such_command(name: str, known: Iterable[str]) -> str:
    """One line for a command that does not exist."""
    known = list(known)
    meant = COMMAND_MEANINGS.get(name.lower().replace("_", "-"), ())
    near = meant or get_close_matches(name, known, n=2, cutoff=0.6)
    hint = f": did you mean {either([f'cputrain {each}' for each in near])}?" if near else "."
    return f"No such command {name[:60]!r}{hint} See cputrain --help"


def no_such_command_of(group: str, name: str, known: Iterable[str]) -> str:
    """One line for a command that a group of commands, as in "cputrain bench", does not have."""
    known = list(known)
    near = get_close_matches(name, known, n=2, cutoff=0.6)
    hint = f"did you mean {either([f'{group} {each}' for each in near])}?" if near else f"give {either(known)}."
    return f"No such command {name[:60]!r}: {hint} See {group} --help"


def missing_argument(error: click.MissingParameter) -> str:
    """One line for an argument that was not given: what lists its values, or what a command line looks like."""
    path = error.ctx.command_path if error.ctx else "cputrain"
    missing = error.format_message().partition(". Choose from")[0].removesuffix(".")
    hint = _values_of(error.param) if error.param else ""
    return f"{missing}{f': {hint}.' if hint else '.'} See {path} --help"


def _values_of(param: click.Parameter) -> str:
    """What tells the values of a parameter; "" where nothing does."""
    described = ARGUMENTS.get(param.metavar or "") or ARGUMENTS.get(param.name or "", "")
    if not described and isinstance(param.type, click.Choice):
        return f"give {either(list(param.type.choices))}"
    return described


def no_such_option(error: click.NoSuchOption) -> str:
    """One line for an option that a command does not have: options that begin like it, mean the same or resemble it,
    else the recipe's key of that meaning, else what launch has in place of another launcher's option."""
    command = error.ctx.command if error.ctx else None
    params = command.params if command else []
    typed, name = error.option_name, error.option_name.lstrip("-").replace("_", "-")
    known = [
        each for param in params for each in param.opts if each.startswith("--") and not getattr(param, "hidden", 0)
    ]
    near = [each for each in known if len(name) > 1 and each.startswith(f"--{name}")]
    near = near or [each for each in OPTION_MEANINGS.get(name, ()) if _has(params, each)]
    if not near and name in BINDING and "--bind" in known:
        return f"No such option {typed}: {BOUND} See {error.ctx.command_path if error.ctx else 'cputrain'} --help"
    near = near or get_close_matches(f"--{name}", [*known, "--help"], n=1, cutoff=0.75)
    near = near or _keys(name, takes_settings=any(param.name == "settings" for param in params))
    hint = f"did you mean {either(near)}?" if near else _of_other_launchers(name) if "--ppn" in known else ""
    path = error.ctx.command_path if error.ctx else "cputrain"
    return f"No such option {typed}{f': {hint}' if hint else '.'} See {path} --help"


def _has(params: Iterable[click.Parameter], option: str) -> bool:
    """Whether a command has an option, and takes the word behind it if there is one: "--ppn", "--format svg"."""
    name, _, value = option.partition(" ")
    shown = [each for each in params if not getattr(each, "hidden", False)]
    return any(name in each.opts and (not value or value in getattr(each.type, "choices", ())) for each in shown)


def _keys(name: str, *, takes_settings: bool) -> list[str]:
    """The recipe's keys that an option may stand for, as they are set."""
    from cputrain.recipe.keys import OTHER_NAMES, all_keys  # pydantic: only for this

    last = name.replace("-", "_")
    found = list(OTHER_NAMES.get(last, ())) or [key for key in all_keys() if key.rpartition(".")[2] == last]
    if takes_settings:
        return [f"{key}=VALUE" for key in found[:3]]
    return [f"cputrain train RECIPE {key}=VALUE" for key in found[:1] if last in OTHER_NAMES or key == last]


def _of_other_launchers(name: str) -> str:
    """What becomes of another launcher's option of that name, and which launcher that is; "" where none has it."""
    from cputrain.other_launchers.programs import PROGRAMS

    for program in PROGRAMS.values():
        for option in program.options:
            if name in {each.lstrip("-") for each in option.names}:
                return f"{program.title} has it; here: {option.launch_option or option.why}."
    return ""


class WholeSummaries(click.Group):
    """A group whose help has the whole summary of each command, on several lines where that is needed, and which names
    its commands to one who gives another."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args[0] not in self.commands and not args[0].startswith("-") and not ctx.resilient_parsing:
            raise click.UsageError(no_such_command_of(ctx.command_path, args[0], self.list_commands(ctx)), ctx)
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        rows = [(name, self.commands[name].get_short_help_str(limit=1000)) for name in self.list_commands(ctx)]
        with formatter.section("Commands"):
            formatter.write_dl(rows)


def catalog_group(names: Callable[[], list[str]]) -> type[click.Group]:
    """A group with the commands `show` and `search` whose first word may be the name of a thing, which is shown, or
    another text, which is searched; a word like a command's with another one behind it is taken for that command."""

    class CatalogGroup(WholeSummaries):
        def resolve_command(
            self, ctx: click.Context, args: list[str]
        ) -> tuple[str | None, click.Command | None, list[str]]:
            word, behind = args[0], args[1:2]
            misspelled = bool(behind) and not behind[0].startswith("-") and bool(_near(word, self))
            if word not in self.commands and not word.startswith("-") and not misspelled:
                args = ["show" if word in names() else "search", *args]
            return super().resolve_command(ctx, args)

    return CatalogGroup


def command_or_list(text: str) -> str:
    """What to do where a command's search for a text finds nothing: a command that it resembles, else the list."""
    group = click.get_current_context().parent
    assert group is not None and isinstance(group.command, click.Group)
    near = _near(text, group.command)
    return f"did you mean {group.command_path} {near[0]}?" if near else f"{group.command_path} lists all of them"


def _near(word: str, group: click.Group) -> list[str]:
    """The command that a word resembles."""
    return get_close_matches(word, group.commands, n=1, cutoff=0.75)
