"""What a job script learns on its job's first host: plan, hosts, network -> shell lines that it reads.

    python -m mpi.first_host FOLDER --launcher srun --port 29500 > FOLDER/first-host.sh

FOLDER/nodes lists the hosts, FOLDER/plan.json is the plan (or is made here, --request). The lines set `launch`, the
launcher's own tokens, and export what its ranks need.
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

from affinity.exit_status import exit_status
from affinity.planner.plan import Plan
from affinity.planner.plan_file import plan_to_json, read_plan, request_from_json
from affinity.planner.this_machine import plan_this_machine
from mpi.fabric import FABRICS, Fabric, fabric_here
from mpi.hosts.groups import Kind
from mpi.hosts.hostfile import read_hostfile
from mpi.launchers.detect import Launcher, newest
from mpi.launchers.job import Job
from mpi.launchers.start import LAUNCHERS, Start, local, start

NODES, PLAN = "nodes", "plan.json"


def launcher_of_job(kind: str) -> Launcher:
    """The launcher as job scripts call it: its newest version's options, which all of them take."""
    # Intel's mpirun is a shell script, which a signal for the ranks would end.
    return replace(newest(kind), program="mpiexec.hydra") if kind == "intelmpi" else newest(kind)


def network(asked: str, hosts: int) -> Fabric:
    """The fabric between so many hosts: as asked, or this host's own."""
    if asked != "auto":
        return FABRICS[asked]
    return FABRICS["shm" if hosts == 1 else fabric_here()]


def plan_here(text: str, fabric: Fabric, command: tuple[str, ...], env: Mapping[str, str]) -> Plan:
    """The plan of this host as a request's JSON asks for it; the link is the fabric's where that does not say."""
    request = request_from_json(text)
    if "link_gbit" not in json.loads(text):
        request = replace(request, link_gbit=fabric.link_gbit)
    return plan_this_machine(request, env, command)


def started(
    plan: Plan, hosts: tuple[str, ...], kind: str, variables: tuple[tuple[str, str], ...], port: int, folder: Path
) -> Start:
    """What starts ranks with these variables on the hosts, up to the rank's own command."""
    job = Job(
        kinds=(Kind(hosts=hosts, plan=plan),),
        command=(),
        plan_path=folder / PLAN,
        log_dir=folder,
        master_port=port,
        variables=variables,
    )
    if job.world_size == 1:  # needs no launcher; under srun a single task would not be taken for a rank
        ((_, told),) = local(job, port)
        return Start(argv=("env", *(f"{name}={value}" for name, value in told.items())))
    return start(job, launcher_of_job(kind), (), folder)


def shell_lines(made: Start) -> str:
    """The lines that the job script reads."""
    exports = [f"export {name}={shlex.quote(value)}" for name, value in made.variables]
    return "\n".join([*exports, f"launch=({shlex.join(made.argv)})"]) + "\n"


def main(arguments: list[str]) -> int:
    """Command line of `python -m mpi.first_host`."""
    parser = argparse.ArgumentParser(prog="python -m mpi.first_host", description="what a job learns on its first host")
    parser.add_argument("folder", type=Path, help="holds nodes and plan.json")
    parser.add_argument("--launcher", choices=sorted(LAUNCHERS), required=True)
    parser.add_argument("--fabric", choices=["auto", *FABRICS], default="auto", help="network between the hosts")
    parser.add_argument("--port", type=int, required=True, help="of rank 0's store")
    parser.add_argument("--request", metavar="JSON", help="make plan.json: what is asked of the plan")
    parser.add_argument("--program", help="what those ranks start: the plan is for its libraries")
    options = parser.parse_args(arguments)
    try:
        hosts = tuple(host.name for host in read_hostfile(options.folder / NODES).hosts)
        fabric = network(options.fabric, len(hosts))
        if options.request is not None:
            command = () if options.program is None else (options.program,)
            plan = plan_here(options.request, fabric, command, os.environ)
            (options.folder / PLAN).write_text(plan_to_json(plan))
        else:
            plan = read_plan(options.folder / PLAN)
        settings = fabric.settings if len(hosts) > 1 else ()
        variables = tuple((name, os.environ.get(name, value)) for name, value, _ in settings)  # the user's own wins
        made = started(plan, hosts, options.launcher, variables, options.port, options.folder)
        for path, text in made.files:
            path.write_text(text)
    except Exception as error:  # noqa: BLE001  bugs are raised again
        return exit_status(error, "first host")
    threads = "+".join(str(worker.intra_op) for worker in plan.workers)
    told = f"{len(plan.workers)} worker(s) of {threads} threads on each of {len(hosts)} host(s), network {fabric.name}"
    print(f"planned on {socket.gethostname()}: {told}", file=sys.stderr)
    print(shell_lines(made), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
