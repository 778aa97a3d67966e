"""What a job runs: a recipe's training, an image preparation or any command, with the tasks and CPUs that it needs."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from affinity.errors import InputError
from affinity.planner.plan import Request
from affinity.topology.catalog import find_machine
from cputrain.jobs.script import Command, Preparation, Training, parse_array
from cputrain.launch.options import (
    NUMBERS_OR_AUTO,
    REQUEST_FIELDS,
    THIS_MACHINE,
    PlanningOptions,
    plan_host,
    request_of_options,
)
from cputrain.launch.recipe_request import check_local_batch, request_of
from cputrain.recipe.loading import dump_recipe, load_recipe
from cputrain.recipe.schema import Recipe

PLANNED = (
    *("threads", "inter_op", "comm_cores", "loader_cores"),
    *("smt", "profile", "openmp", "allocator", "e_cores", "balance"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class SizedWork:
    """What a job runs, its default name, and the tasks and CPUs of each host; None: known only when the job runs."""

    work: Training | Preparation | Command
    name: str
    ppn: int | None
    cpus: int | None


def recipe_work(
    options: PlanningOptions, words: tuple[str, ...], array: str | None, stage: str | None, env: Mapping[str, str]
) -> SizedWork:
    """The training of the recipe words[0] with the settings words[1:]."""
    check_local_batch(options.local_batch)
    recipe = load_recipe(words[0], words[1:])
    if recipe.plan.share or recipe.plan.oversubscribe:
        raise InputError(
            "plan.share and plan.oversubscribe are for a host that is shared with others: remove them for a job"
        )
    if stage is not None and (recipe.data.path is None or recipe.data.generated):
        raise InputError(
            "--stage copies the recipe's data.path, which is not a folder: set it to one, or remove --stage"
        )
    ppn, cpus = _tasks_and_cpus(options, request_of(recipe), env)
    fixed_ppn = ppn if options.machine != THIS_MACHINE else options.ppn
    work = Training(
        recipe=dump_recipe(recipe.model_copy(update={"output": ""})),
        settings=options.recipe_settings,
        output=str(recipe.folder),
        plan_options=(
            *("--nodes", str(len(options.hosts)), "--fabric", options.fabric),
            *(("--ppn", str(fixed_ppn)) if fixed_ppn is not None else ()),
            *(("--link-gbit", f"{options.link_gbit:g}") if options.link_gbit is not None else ()),
        ),
        data=None if recipe.data.generated else recipe.data.path,
        stage=stage,
        array=None if array is None else parse_array(array),
        paths=tuple(path for path in (recipe.data.stage_dir, recipe.model.weights) if path is not None),
    )
    return SizedWork(work=work, name=recipe.name, ppn=ppn, cpus=cpus)


def preparation_work(options: PlanningOptions, arguments: tuple[str, ...]) -> SizedWork:
    """An image preparation; `arguments` are KIND, SRC, OUT and the options of `cputrain prepare`."""
    given = [name for name in (*NUMBERS_OR_AUTO, *REQUEST_FIELDS, "smt") if getattr(options, name) is not None]
    given += [name for name in ("fabric", "launcher") if getattr(options, name) != "auto"]
    if given or len(options.hosts) > 1:
        option = given[0].replace("_", "-") if given else "nodes"
        raise InputError(
            f"--{option}: images are prepared by one process on one host, with all its cores: remove --{option}"
        )
    return SizedWork(
        work=Preparation(arguments=arguments),
        name=f"prepare-{Path(arguments[2]).name}",
        ppn=1,
        cpus=len(find_machine(options.machine).allowed_pus) if options.machine != THIS_MACHINE else None,
    )


def in_job(argv: tuple[str, ...]) -> tuple[str, ...]:
    """A command as a job runs it: a .py file under the python that is first on PATH there."""
    return ("python", *argv) if argv[0].endswith(".py") else argv


def command_work(options: PlanningOptions, argv: tuple[str, ...], env: Mapping[str, str]) -> SizedWork:
    """Any command, planned like `cputrain launch` plans it."""
    argv = in_job(argv)
    base = Request(pin_threads=False)  # loader processes that a script starts must not share one PU
    ppn, cpus = _tasks_and_cpus(options, base, env)
    default = asdict(Request())
    requested = {**asdict(request_of_options(options, base)), "ppn": ppn}
    fields = {name: value for name, value in requested.items() if value != default[name] and name != "link_gbit"}
    if options.link_gbit is not None:  # else the first host's network decides
        fields["link_gbit"] = options.link_gbit
    scripts = (word for word in argv if word.endswith((".py", ".sh")) and len(word.split()) == 1)  # not sh -c's
    name = Path(next(scripts, argv[0])).stem
    return SizedWork(work=Command(argv=argv, request=json.dumps(fields)), name=name, ppn=ppn, cpus=cpus)


def planning_words(options: PlanningOptions, recipe: Recipe | None) -> tuple[str, ...]:
    """The options, and a recipe's plan where they say nothing, as options of `cputrain launch`; without --ppn."""
    found = []
    for name in PLANNED:
        value = getattr(options, name)
        if value is None and recipe is not None:
            value = getattr(recipe.plan, name)
        if value not in (None, "auto", "equal"):
            found += [f"--{name.replace('_', '-')}", str(value)]
    batch = options.local_batch
    if recipe is not None and recipe.plan.balance == "batch":
        batch = recipe.batch.local  # that is divided in proportion to cores
    if batch is not None:
        found += ["--local-batch", str(batch)]
    if options.link_gbit is not None:
        found += ["--link-gbit", f"{options.link_gbit:g}"]
    if options.fabric != "auto":
        found += ["--fabric", options.fabric]
    return tuple(found)


def _tasks_and_cpus(options: PlanningOptions, base: Request, env: Mapping[str, str]) -> tuple[int | None, int | None]:
    """Workers and CPUs per host of the named machine; without one only the requested workers are known."""
    if options.machine == THIS_MACHINE:
        return request_of_options(options, base).ppn, None
    plan = plan_host(options, base, env)
    return len(plan.workers), len(plan.machine.allowed_pus)
