"""A planned job as text: the plan as JSON, the command that starts it, and the files of `cputrain plan --write`."""

import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from affinity.planner.plan_file import PLAN_FILE, dumps, plan_to_json
from affinity.ranks.rank import MASTER_PORT
from affinity.views.svg import plan_to_svg
from affinity.wording import counted
from cputrain.files import write_atomic
from cputrain.launch.hosts import check_binder, uses_launcher
from cputrain.launch.options import THIS_MACHINE, PlanningOptions, assumed, planned_launcher
from mpi.hosts.groups import Cluster, cluster_to_dict, job_plan_json
from mpi.launchers.command import launch_command
from mpi.launchers.job import Job, bound_command
from mpi.launchers.launcher import InstalledLauncher
from mpi.launchers.script import HERE, launch_script, shell_line, workers_line

if TYPE_CHECKING:
    from cputrain.recipe.schema import Recipe


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanFiles:
    """The files that start a planned job, by name."""

    texts: dict[str, str]

    def write(self, folder: Path) -> None:
        """Write them into a folder; launch.sh becomes executable."""
        for name, text in self.texts.items():
            write_atomic(folder / name, text.encode())
        (folder / "launch.sh").chmod(0o755)


def cluster_json(cluster: Cluster) -> str:
    """The plan of all hosts, or the plans of the groups of hosts that differ, as JSON."""
    return plan_to_json(cluster.groups[0].plan) if len(cluster.groups) == 1 else dumps(cluster_to_dict(cluster))


def start_command(job: Job, options: PlanningOptions, env: Mapping[str, str]) -> tuple[str, str]:
    """The command line that starts the job from any folder, and a hint where it needs files of `plan --write`."""
    check_binder(options)
    if not uses_launcher(options):
        if options.machine == THIS_MACHINE:
            return workers_line(replace(job, plan_on_host=True), MASTER_PORT), ""
        return workers_line(job, MASTER_PORT), "plan.json is the output of --format json"
    launcher = planned_launcher(options, env)
    real = options.machine == THIS_MACHINE and (options.real_hosts or job.hosts == ("localhost",))
    if real and len(job.groups) == 1 and not (job.binder == "launcher" and launcher.launcher.binds_by_file):
        alone = replace(job, plan_on_host=True)
        return shell_line(launch_command(alone, launcher, bound_command(alone), None)), ""
    made = launch_command(job, launcher, bound_command(job), Path())
    files = f"{PLAN_FILE}, hosts" if made.files else PLAN_FILE
    written = f"--write DIR writes {files} and a launch.sh with this command"
    return shell_line(made), "; ".join(filter(None, (assumed(options, launcher), written)))


def plan_files(job: Job, launcher: InstalledLauncher, recipe: "Recipe | None") -> PlanFiles:
    """plan.json, plan.svg, hostfile, rankfile where the launcher has one, recipe, and launch.sh, which starts it all.

    Without a recipe launch.sh takes the command to start as its arguments.
    """
    texts = {PLAN_FILE: job_plan_json(job.groups)}
    command: tuple[str, ...] = ()
    if recipe is not None:
        from cputrain.recipe.loading import dump_recipe, with_absolute_paths

        texts["recipe.yaml"] = dump_recipe(with_absolute_paths(recipe))
        command = (sys.executable, "-m", "cputrain", "train", str(HERE / "recipe.yaml"))
    job = replace(job, command=command, plan_path=HERE / PLAN_FILE)
    made = launch_command(job, launcher, bound_command(job), HERE)
    size = f"{counted(job.world_size, 'rank')} on {counted(len(job.hosts), 'host')}"
    about = f"{size}, as in {PLAN_FILE}; written by cputrain plan"
    texts |= {path.name: text for path, text in made.files}
    texts["launch.sh"] = launch_script(made, about, open_end=recipe is None)
    for i, group in enumerate(job.groups):
        texts["plan.svg" if len(job.groups) == 1 else f"plan-{i}.svg"] = plan_to_svg(group.plan)
    return PlanFiles(texts=texts)
