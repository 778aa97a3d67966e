"""`python -m affinity read|plan|bind`: the package on its own, for any training and without torch."""

import argparse
import json
import os
import sys
from dataclasses import asdict

from affinity import bind
from affinity.catalog import find_machine
from affinity.errors import InputError, RunError
from affinity.picture import picture
from affinity.plan import Plan, Request, plan_machine
from affinity.plan_file import plan_to_json
from affinity.runtime import Runtime, find_runtime, target_of
from affinity.svg import picture_svg


def main(arguments: list[str]) -> int:
    """Exit status 0 done, 2 the input is wrong, 1 the kernel gave something else than planned."""
    if arguments[:1] == ["bind"]:
        return bind.main(arguments[1:])
    parser = argparse.ArgumentParser(prog="python -m affinity", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    reader = commands.add_parser("read", help="a machine, as JSON")
    planner = commands.add_parser("plan", help="a plan, as text, JSON or SVG")
    commands.add_parser("bind", help="bind as a plan says and become a command", add_help=False)
    for command in (reader, planner):
        command.add_argument(
            "--machine", default="this", help="this, a name, a folder, a tarball, 'pack:2 core:24 pu:2'"
        )
    for name in ("ppn", "threads", "inter-op", "comm-cores", "loader-cores"):
        planner.add_argument(f"--{name}", type=int)
    planner.add_argument("--smt", action="store_true", help="second hardware threads compute")
    planner.add_argument("--nodes", type=int, default=1, help="hosts of the job")
    planner.add_argument("--format", choices=("text", "json", "svg"), default="text")
    options = vars(parser.parse_args(arguments))
    command, spec, form = options.pop("command"), options.pop("machine"), options.pop("format", None)
    try:
        machine = find_machine(spec)
        if command == "read":
            print(json.dumps(asdict(machine), indent=1))
        else:
            runtime = find_runtime(target_of(()), os.environ) if spec == "this" else Runtime()
            print(shown(plan_machine(machine, Request(**options), runtime), form))
    except (InputError, RunError) as error:
        print(f"affinity: {error}", file=sys.stderr)
        return 2 if isinstance(error, InputError) else 1
    return 0


def shown(plan: Plan, form: str | None) -> str:
    """The plan as text, JSON or SVG."""
    if form == "json":
        return plan_to_json(plan)
    return picture_svg(plan) if form == "svg" else picture(plan, coloured=sys.stdout.isatty())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
