"""Plan a job on its first host: print shell lines for the job script, from the plan, the hosts and the network.

    python -m cputrain.mpi.first_host FOLDER --launcher srun --port 29500 > FOLDER/first-host.sh

FOLDER/nodes lists the hosts; FOLDER/plan.json is the plan, or is written here (--request). The lines set `launch`, the
launcher's command line, and export the environment variables for its ranks.
"""

import argparse
import json
import os
import shlex
import socket
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from cputrain.affinity.filesystem import PLAN_FILE
from cputrain.affinity.planner.plan import Plan
from cputrain.affinity.planner.plan_file import plan_to_json, read_plan, request_from_json
from cputrain.affinity.planner.records import plan_this_machine
from cputrain.affinity.terminal import exit_status, use_utf8
from cputrain.affinity.wording import plural, spread
from cputrain.mpi.fabric import FABRICS, Fabric, fabric_between
from cputrain.mpi.hostfile import HostGroup, read_hostfile
from cputrain.mpi.launch_command import build_launch_command, on_job_hosts
from cputrain.mpi.launchers import LAUNCHERS, Job, LaunchCommand, Variables, local_commands
from cputrain.mpi.supervise.processes import write_files
from cputrain.mpi.supervise.wire import TOKEN_VARIABLE

NODES, PLAN = "nodes", PLAN_FILE
# The script generates the token: other users may be able to read the file with these lines.
NEW_TOKEN = f"export {TOKEN_VARIABLE}=\"$(od -An -N16 -tx1 /dev/urandom | tr -d ' \\n')\""


def plan_here(text: str, fabric: Fabric, command: tuple[str, ...], env: Mapping[str, str]) -> Plan:
    """Plan this host for a request in JSON and a fabric, whose link speed is used if the request has none."""
    request = replace(request_from_json(text), fabric=fabric.name)
    if "link_gbit" not in json.loads(text):
        request = replace(request, link_gbit=fabric.link_gbit)
    from cputrain.predict.next_best import compare_plan  # where the plan is written already, it needs no model

    return plan_this_machine(request, env, command, compare=compare_plan)


def command_of_ranks(
    plan: Plan, hosts: tuple[str, ...], launcher: str, variables: Variables, port: int, folder: Path
) -> LaunchCommand:
    """Return the command that starts ranks with these variables on the hosts; the rank's command is appended to it."""
    job = Job(
        groups=(HostGroup(hosts=hosts, plan=plan),),
        command=(),
        plan_path=folder / PLAN,
        log_dir=folder,
        master_port=port,
        variables=variables,
        secrets=((TOKEN_VARIABLE, ""),),  # the value is generated in shell_lines
    )
    if job.world_size == 1:  # needs no launcher; under srun a single task would not be recognized as a rank
        (alone,) = local_commands(job, port)
        return LaunchCommand(argv=("env", *(f"{name}={value}" for name, value in alone.variables)))
    return build_launch_command(job, on_job_hosts(launcher), (), folder)


def shell_lines(command: LaunchCommand) -> str:
    """Return the lines that the job script sources."""
    exports = [f"export {name}={shlex.quote(value)}" for name, value in command.variables if name != TOKEN_VARIABLE]
    return "\n".join([*exports, NEW_TOKEN, f"launch=({shlex.join(command.argv)})"]) + "\n"


def main(arguments: list[str], env: Mapping[str, str]) -> int:
    """Command line of `python -m cputrain.mpi.first_host`."""
    parser = argparse.ArgumentParser(
        prog="python -m cputrain.mpi.first_host", description="plan a job on its first host"
    )
    parser.add_argument("folder", type=Path, help="folder with nodes and plan.json")
    parser.add_argument("--launcher", choices=sorted(LAUNCHERS), required=True)
    parser.add_argument("--fabric", choices=["auto", *FABRICS], default="auto", help="network between the hosts")
    parser.add_argument("--port", type=int, required=True, help="port of rank 0's store")
    parser.add_argument("--request", metavar="JSON", help="write plan.json for this request")
    parser.add_argument("--program", help="program of the ranks, whose libraries the plan takes into account")
    options = parser.parse_args(arguments)
    try:
        hosts = tuple(host.name for host in read_hostfile(options.folder / NODES).hosts)
        fabric = fabric_between(len(hosts), options.fabric)
        if options.request is not None:
            program = () if options.program is None else (options.program,)
            plan = plan_here(options.request, fabric, program, env)
            (options.folder / PLAN).write_text(plan_to_json(plan), encoding="utf-8")
        else:
            plan = read_plan(options.folder / PLAN)
        settings = fabric.settings if len(hosts) > 1 else ()
        variables = tuple((name, env.get(name, value)) for name, value, _ in settings)  # the user's values win
        command = command_of_ranks(plan, hosts, options.launcher, variables, options.port, options.folder)
        write_files(command.files)
    except Exception as error:  # noqa: BLE001  bugs are raised again
        return exit_status(error, "first host")
    hostname, workers = socket.gethostname(), plural(len(plan.workers), "worker")
    threads = spread([worker.intra_op for worker in plan.workers], "thread")
    where = f"planned on {hostname} for {plural(len(hosts), 'host')}"
    print(f"{where}: {workers} per host, {threads} per worker, fabric {fabric.name}", file=sys.stderr)
    print(shell_lines(command), end="")
    return 0


if __name__ == "__main__":
    use_utf8()
    sys.exit(main(sys.argv[1:], os.environ))
