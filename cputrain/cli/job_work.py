"""What a job is to run, from the words of `cputrain job`: a recipe, an image preparation or any command."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from affinity.errors import InputError
from affinity.planner.plan import Request
from affinity.topology.catalog import find_machine
from cputrain.cli.options import NUMBERS, OTHERS, Asked, make_plan, request
from cputrain.jobs.script import Command, Preparation, Training, parse_sweep
from cputrain.launch.planning import request_of
from cputrain.recipe.loading import dump_recipe, load_recipe


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What a job runs, what to call it, and tasks and CPUs of each host where they are known before it runs."""

    work: Training | Preparation | Command
    name: str
    ppn: int | None
    cpus: int | None


def training(asked: Asked, words: tuple[str, ...], array: str | None, stage: str | None) -> Wanted:
    """The training of a recipe, words[0], with settings."""
    if asked.local_batch is not None:
        raise InputError(f"--local-batch beside a recipe: set batch.local={asked.local_batch} in the recipe")
    recipe = load_recipe(words[0], words[1:])
    if recipe.plan.share or recipe.plan.oversubscribe:
        raise InputError(
            "plan.share and plan.oversubscribe are for one host that others use too: leave them out of a job"
        )
    if stage is not None and (recipe.data.path is None or recipe.data.generated):
        raise InputError("--stage copies the recipe's data.path, which names no folder: set it, or leave --stage out")
    ppn, cpus = _numbers(asked, request_of(recipe))
    fixed = ppn if asked.machine != "this" else asked.ppn
    work = Training(
        recipe=dump_recipe(recipe.model_copy(update={"output": ""})),
        settings=_planned(asked),
        output=str(recipe.folder),
        plan_options=(
            *("--nodes", str(len(asked.hosts)), "--fabric", asked.fabric),
            *(("--ppn", str(fixed)) if fixed is not None else ()),
            *(("--link-gbit", f"{asked.link_gbit:g}") if asked.link_gbit is not None else ()),
        ),
        data=None if recipe.data.generated else recipe.data.path,
        stage=stage,
        sweep=None if array is None else parse_sweep(array),
        paths=tuple(path for path in (recipe.data.stage_dir, recipe.model.weights) if path is not None),
    )
    return Wanted(work=work, name=recipe.name, ppn=ppn, cpus=cpus)


def preparation(asked: Asked, arguments: tuple[str, ...]) -> Wanted:
    """An image preparation: KIND, SRC, OUT and options, checked as `cputrain prepare` checks them."""
    from cputrain.cli.prepare import command  # the image libraries: only where they are needed

    planned = [name for name in (*NUMBERS, *OTHERS, "smt") if getattr(asked, name) is not None]
    planned += [name for name in ("fabric", "launcher") if getattr(asked, name) != "auto"]
    if planned or len(asked.hosts) > 1:
        what = planned[0].replace("_", "-") if planned else "nodes"
        raise InputError(f"--{what}: images are prepared by one process on one host, with all its cores: leave it out")
    command.make_context("cputrain job --prepare", list(arguments))
    return Wanted(
        work=Preparation(arguments=arguments),
        name=f"prepare-{Path(arguments[2]).name}",
        ppn=1,
        cpus=len(find_machine(asked.machine).allowed_pus) if asked.machine != "this" else None,
    )


def any_command(asked: Asked, argv: tuple[str, ...]) -> Wanted:
    """Any command, planned as `cputrain launch` plans it."""
    base = Request(pin_threads=False)  # loader processes that a script starts must not share one PU
    ppn, cpus = _numbers(asked, base)
    default = asdict(Request())
    wanted = {**asdict(request(asked, base)), "ppn": ppn}
    fields = {name: value for name, value in wanted.items() if value != default[name] and name != "link_gbit"}
    if asked.link_gbit is not None:  # else the first host's network decides
        fields["link_gbit"] = asked.link_gbit
    scripts = (word for word in argv if word.endswith((".py", ".sh")) and len(word.split()) == 1)  # not sh -c's
    called = Path(next(scripts, argv[0])).stem
    return Wanted(work=Command(argv=argv, request=json.dumps(fields)), name=called, ppn=ppn, cpus=cpus)


def _numbers(asked: Asked, base: Request) -> tuple[int | None, int | None]:
    """Workers and CPUs of a host of the named machine; without one, workers where they are asked for."""
    if asked.machine == "this":
        return request(asked, base).ppn, None
    plan = make_plan(asked, base)
    return len(plan.workers), len(plan.machine.allowed_pus)


def _planned(asked: Asked) -> tuple[str, ...]:
    """The planning options, said as settings of the recipe, for the plan that is made on the first host."""
    names = ("threads", "inter_op", "comm_cores", "loader_cores", "smt", "profile", "openmp", "balance")
    return tuple(f"plan.{name}={value}" for name in names if (value := getattr(asked, name)) is not None)
