"""`python -m affinity read|plan|bind|show`: the package on its own, for any training and without torch."""

import argparse
import json
import os
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from affinity import bind
from affinity.errors import InputError
from affinity.exit_status import exit_status
from affinity.kernel.neighbors import NOT_SHARED, plan_beside
from affinity.kernel.running import look_at, planned_pids, report
from affinity.planner.plan import Plan, Request, plan_machine
from affinity.planner.plan_file import plan_to_json, read_plan
from affinity.planner.profiles import PROFILES
from affinity.planner.request import BALANCES, OPENMP
from affinity.planner.runtime import Runtime
from affinity.topology.catalog import find_machine
from affinity.views.diff import plan_differences
from affinity.views.svg import picture_svg
from affinity.views.text import picture

FORMATS = ("text", "json", "svg")


def main(arguments: list[str]) -> int:
    """Exit status 0 done, 2 the input is wrong, 1 the kernel gave something else than planned."""
    if arguments[:1] == ["bind"]:
        return bind.main(arguments[1:])
    options = vars(_parser().parse_args(arguments))
    try:
        return COMMANDS[options.pop("command")](options)
    except Exception as error:  # noqa: BLE001  bugs are raised again
        return exit_status(error, "affinity")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m affinity", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    reader = commands.add_parser("read", help="a machine, as JSON")
    planner = commands.add_parser("plan", help="a plan, as text, JSON or SVG")
    commands.add_parser("bind", help="bind as a plan says and become a command", add_help=False)
    shower = commands.add_parser("show", help="a saved plan; two, compared; or plan against fact of running processes")
    for command in (reader, planner):
        command.add_argument(
            "--machine", default="this", help="this, a name, a folder, a tarball, FILE.xml, 'pack:2 core:24 pu:2'"
        )
    for name in ("ppn", "threads", "inter-op", "comm-cores", "loader-cores", "local-batch"):
        planner.add_argument(f"--{name}", type=int)
    planner.add_argument("--smt", action="store_true", help="second hardware threads compute")
    planner.add_argument("--nodes", type=int, default=1, help="hosts of the job")
    planner.add_argument("--link-gbit", type=float, default=100.0, help="speed of a host's link")
    planner.add_argument("--profile", choices=tuple(PROFILES), default="auto", help="published practice")
    planner.add_argument("--balance", choices=BALANCES, default="equal", help="batch: batches in proportion to cores")
    planner.add_argument("--openmp", choices=OPENMP, default="auto", help="OpenMP runtime; auto: that which is loaded")
    planner.add_argument("--oversubscribe", action="store_true", help="allow more workers than cores: they share cores")
    planner.add_argument("--share", action="store_true", help="leave cores to running processes of other plans")
    planner.add_argument("--explain", action="store_true", help="also the plans not taken, and what the rules assume")
    planner.add_argument("--format", choices=FORMATS, default="text")
    shower.add_argument("plans", nargs="*", type=Path, metavar="PLAN.json", help="one or two; none: running processes")
    shower.add_argument("--pid", type=int, action="append", help="a running process; default: all bound by a plan")
    shower.add_argument("--format", choices=FORMATS, default="text")
    return parser


def _read(options: dict[str, Any]) -> int:
    print(json.dumps(asdict(find_machine(options["machine"])), indent=1))
    return 0


def _plan(options: dict[str, Any]) -> int:
    spec, form, explain, share = (options.pop(name) for name in ("machine", "format", "explain", "share"))
    request = Request(**options)
    if spec == "this":
        plan = plan_beside(request, os.environ, share=share)
    elif share:
        raise InputError(NOT_SHARED)
    else:
        plan = plan_machine(find_machine(spec), request, Runtime())
    _print(plan, form, explained=explain)
    return 0


def _show(options: dict[str, Any]) -> int:
    paths: list[Path] = options["plans"]
    if len(paths) > 2:
        raise InputError(f"{len(paths)} plans given: give one to show or two to compare")
    plans = [read_plan(path) for path in paths]
    if len(plans) == 2:
        print("\n".join(plan_differences(*plans)) or "the same plan")
    elif plans:
        _print(plans[0], options["format"])
    else:
        found = options["pid"] or planned_pids()
        if not found:
            raise InputError("no process here was bound by a plan: give a plan, or --pid")
        print(report([look_at(pid) for pid in found]))
    return 0


def _print(plan: Plan, form: str, *, explained: bool = False) -> None:
    if form == "json":
        print(plan_to_json(plan))
    elif form == "svg":
        print(picture_svg(plan))
    else:
        print(picture(plan, coloured=sys.stdout.isatty(), explained=explained))


COMMANDS: dict[str, Callable[[dict[str, Any]], int]] = {"read": _read, "plan": _plan, "show": _show}

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
