"""Plans in every output format, and files to launch a plan by hand."""

import json
import shlex
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from cputrain.affinity.errors import InputError, as_option
from cputrain.affinity.filesystem import PLAN_FILE, check_execution, check_writable, write_bytes
from cputrain.affinity.planner.plan_file import plan_json, plan_to_json
from cputrain.affinity.rank import MASTER_PORT
from cputrain.affinity.start import isolated_command
from cputrain.affinity.views import plan_to_svg, plan_to_text
from cputrain.affinity.wording import plural
from cputrain.launch.options import (
    THIS_HOST,
    THIS_MACHINE,
    PlanningOptions,
    assumptions,
    check_binder,
    converted_hostfile,
    planned_launcher,
    uses_launcher,
)
from cputrain.mpi.hostfile import Cluster, cluster_to_dict, fold_hosts, job_plan_json
from cputrain.mpi.launch_command import HERE, build_launch_command, launch_script, shell_line, workers_line
from cputrain.mpi.launchers import InstalledLauncher, Job, bound_command, local_commands


def start_command(job: Job, options: PlanningOptions, env: Mapping[str, str]) -> tuple[str, str]:
    """Return the command line that starts the job from any directory, and a hint about files of `plan --write`."""
    check_binder(options)
    if not uses_launcher(options):
        if options.machine == THIS_MACHINE:
            return workers_line(replace(job, plan_on_host=True), MASTER_PORT), ""
        return workers_line(job, MASTER_PORT), "write plan.json with --format json"
    launcher = planned_launcher(options, env)
    real = options.machine == THIS_MACHINE and (options.real_hosts or job.hosts == THIS_HOST)
    if real and len(job.groups) == 1 and not (job.binder == "launcher" and launcher.launcher.binds_by_file):
        alone = replace(job, plan_on_host=True)
        return shell_line(build_launch_command(alone, launcher, bound_command(alone), None)), ""
    made = build_launch_command(job, launcher, bound_command(job), Path())
    files = f"{PLAN_FILE}, hosts" if made.files else PLAN_FILE
    written = f"--write DIR writes {files} and a launch.sh with this command"
    return shell_line(made), "; ".join(filter(None, (assumptions(options, launcher), written)))


def write_plan_files(
    job: Job,
    options: PlanningOptions,
    folder: Path,
    recipe_text: str | None,
    env: Mapping[str, str],
    report: Callable[[str], None],
) -> str:
    """Write the plan's files into a new folder, with the text of a recipe if it is to be trained; return a line that
    says how to start them. `report` shows a note to the
    user. Raises InputError if the folder is not empty, or no launcher starts the job."""
    check_writable(folder, "--write")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise InputError(f"--write {folder} already exists: choose another folder")
    if options.launcher == "local":
        raise InputError("--write writes files for a launcher: choose one with --launcher")
    launcher = planned_launcher(options, env)
    if job.het_groups and launcher.launcher.component is not None and recipe_text is None:
        raise InputError(
            "--write cannot make a launch.sh for any command in a heterogeneous job: give a RECIPE, or use launch"
        )
    for note in filter(None, (converted_hostfile(options, launcher), assumptions(options, launcher))):
        report(note)
    files = plan_files(job, launcher, recipe_text)
    for name, text in files.items():
        write_bytes(folder / name, text.encode(errors="surrogateescape"))  # a shell's paths are bytes
    (folder / "launch.sh").chmod(0o755)
    arguments = "" if recipe_text else " CMD..."
    shell = ""
    try:
        check_execution(folder / "launch.sh")
    except PermissionError:  # mounted with noexec, so a shell must read the script
        shell = "sh "
    return f"{folder}: {', '.join(sorted(files))}; start with {shell}{folder}/launch.sh{arguments}"


def plan_files(job: Job, launcher: InstalledLauncher, recipe_text: str | None) -> dict[str, str]:
    """Return texts by file name: plan.json, plan.svg, hostfile and rankfile if the launcher uses them, recipe, and
    launch.sh, which starts them.

    Without a recipe the arguments of launch.sh are the command to start.
    """
    texts = {PLAN_FILE: job_plan_json(job.groups)}
    command: tuple[str, ...] = ()
    if recipe_text is not None:
        texts["recipe.yaml"] = recipe_text
        command = (*isolated_command("cputrain"), "train", str(HERE / "recipe.yaml"))
    job = replace(job, command=command, plan_path=HERE / PLAN_FILE)
    made = build_launch_command(job, launcher, bound_command(job), HERE)
    size = f"{plural(job.world_size, 'rank')} on {plural(len(job.hosts), 'host')}"
    about = f"{size}, as in {PLAN_FILE}; written by cputrain plan"
    texts |= {path.name: text for path, text in made.files}
    texts["launch.sh"] = launch_script(made, about, open_end=recipe_text is None)
    for i, group in enumerate(job.groups):
        texts["plan.svg" if len(job.groups) == 1 else f"plan-{i}.svg"] = plan_to_svg(group.plan)
    return texts


def launch_text(job: Job, launcher: InstalledLauncher | None, folder: Path, *, live: bool) -> str:
    """Return the plans of a launch and the command that would run; `live`: with redrawn progress bars of the ranks."""
    plans = (f"{plan_to_text(group.plan, wording=as_option)}\n" for group in job.groups)
    if launcher is not None:
        from cputrain.mpi.supervise.run import remote_command  # imports supervision, which a plan alone does not need

        start = remote_command(job, launcher, folder, "ADDRESS", "PORT", "TOKEN", live=live)
        return "\n".join(
            (
                *plans,
                f"command\n  {shell_line(start)}",
                "cputrain.mpi.supervise.agent reports to this host's ADDRESS and PORT with the launch's TOKEN. "
                "To start the ranks without it:",
                "cputrain plan --write DIR with the same planning options, then DIR/launch.sh CMD",
            )
        )
    port = job.master_port or MASTER_PORT
    more = "; the others differ in RANK and LOCAL_RANK" if job.ppn > 1 else ""
    return "\n".join(
        (
            *plans,
            f"command of worker 0 of {job.ppn}{more}",
            f"  {shell_line(local_commands(job, port)[0])}",
            "to start the workers by hand, without a folder for plan and logs",
            f"  {workers_line(replace(job, plan_on_host=True), port)}",
        )
    )


def cluster_json(cluster: Cluster) -> str:
    """Return the plan of all hosts, or the plans of the groups of hosts that differ, as JSON."""
    return plan_to_json(cluster.groups[0].plan) if len(cluster.groups) == 1 else plan_json(cluster_to_dict(cluster))


def _env(cluster: Cluster) -> str:
    """Return shell assignments, one block for each worker."""
    blocks = (
        f"# worker {worker.local_rank}\n" + "\n".join(f"export {k}={shlex.quote(v)}" for k, v in worker.env.items())
        for worker in cluster.groups[0].plan.workers
    )
    return "\n".join(blocks)


def _yaml(cluster: Cluster) -> str:
    import yaml  # slow to import, and needed for one format only

    return str(yaml.safe_dump(json.loads(cluster_json(cluster)), sort_keys=False)).rstrip()


FORMATS: dict[str, Callable[[Cluster], str]] = {
    "json": cluster_json,
    "yaml": _yaml,
    "svg": lambda cluster: plan_to_svg(cluster.groups[0].plan, wording=as_option),
    "env": _env,
}


def formatted(cluster: Cluster, output_format: str) -> str:
    """Convert the plans to one of FORMATS. Raises InputError for several groups if the format shows one."""
    if output_format != "json" and len(cluster.groups) > 1:
        raise InputError(
            f"--format {output_format} shows one group of hosts: use text, json or command, or plan each group alone"
        )
    return FORMATS[output_format](cluster)


def cluster_text(cluster: Cluster, *, colored: bool, explained: bool) -> str:
    """Return the plans as text, one for each group of hosts, followed by warnings about the cluster."""
    several, lines = len(cluster.groups) > 1, []
    for group in cluster.groups:
        if several:
            lines.append(f"{plural(len(group.hosts), 'host')}: {fold_hosts(group.hosts)}")
        shown = plan_to_text(group.plan, colored=colored, explained=explained, wording=as_option)
        lines.append(shown + ("\n" if several else ""))
    if several:
        hosts = sum(len(group.hosts) for group in cluster.groups)
        workers = sum(len(group.hosts) * len(group.plan.workers) for group in cluster.groups)
        lines.append(f"{plural(hosts, 'host')}, {plural(workers, 'worker')}")
    return "\n".join((*lines, *(f"warning: {warning}" for warning in cluster.warnings)))
