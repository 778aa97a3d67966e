"""`python -m cputrain.affinity read|plan|bind|show`: planning and binding alone, for any program, without torch."""

from cputrain.affinity.start import isolate

if __name__ == "__main__":
    isolate()

import argparse
import json
import os
import signal
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from cputrain.affinity import bind
from cputrain.affinity.bound_plan import NOT_SHARED, binding_report, plan_beside, read_host_plan, running_processes
from cputrain.affinity.errors import InputError, RequestError, as_option
from cputrain.affinity.planner.plan import Plan, Request, plan_machine
from cputrain.affinity.planner.plan_file import plan_to_json, read_plan
from cputrain.affinity.planner.request import CHOICE, CPUS, FLAG, OPTIONS, SPEED, SWITCH, Option
from cputrain.affinity.terminal import exit_status, shows_color, status_of_signal, use_utf8
from cputrain.affinity.topology.catalog import find_machine
from cputrain.affinity.topology.machine import parse_list
from cputrain.affinity.views import plan_differences, plan_to_svg, plan_to_text

FORMATS = ("text", "json", "svg")


def main(arguments: list[str], env: Mapping[str, str]) -> int:
    """Run a command and return its exit status: 0 done, 2 wrong input, 1 a running process differs from its plan."""
    if arguments[:1] == ["bind"]:
        return bind.main(arguments[1:], env)
    try:
        options = vars(_parser().parse_args(arguments))
        status = COMMANDS[options.pop("command")](options, env)
        sys.stdout.flush()
        return status
    except BrokenPipeError:  # the reader has ended (`| head`)
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return status_of_signal(signal.SIGPIPE)
    except Exception as error:  # noqa: BLE001  bugs are raised again
        return exit_status(error, "affinity", as_option)


def _parser() -> argparse.ArgumentParser:
    parser = bind.Parser(prog="python -m cputrain.affinity", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    reader = commands.add_parser("read", help="print a machine as JSON")
    planner = commands.add_parser("plan", help="print a plan as text, JSON or SVG")
    commands.add_parser("bind", help="bind as planned and run a command", add_help=False)
    shower = commands.add_parser(
        "show",
        help="show a saved plan, compare two, or compare running processes with their plans",
        description="Show a saved plan, compare two, or compare running processes with their plans. "
        "Exit status 1 if a process differs from its plan.",
    )
    for command in (reader, planner):
        command.add_argument(
            "--machine",
            default="this",
            help="this, a catalog name, a folder, a tarball, FILE.xml, or 'pack:2 core:24 pu:2'",
        )
    planner.add_argument("--nodes", type=int, default=1, help="number of hosts in the job")
    for option in OPTIONS:
        default = getattr(Request(), option.name, False)
        planner.add_argument(option.flag, default=default, help=option.help, **_kind(option))
    planner.add_argument(
        "--explain", action="store_true", help="also show plans with other numbers of workers, and the assumed figures"
    )
    planner.add_argument("--format", choices=FORMATS, default="text")
    shower.add_argument(
        "plans",
        nargs="*",
        type=Path,
        metavar="PLAN.json",
        help="one to show, two to compare, one for the processes of --pid; default: processes",
    )
    shower.add_argument(
        "--pid",
        type=int,
        action="append",
        help="process to compare with PLAN.json, or with its own plan; default: all bound by a plan",
    )
    shower.add_argument("--format", choices=FORMATS, default="text")
    return parser


def _kind(option: Option) -> dict[str, Any]:
    """Return the arguments of argparse's `add_argument` for an option's kind."""
    if option.kind in (FLAG, SWITCH):
        return {"action": "store_true"}
    if option.kind == CHOICE:
        return {"choices": option.choices}
    if option.kind == SPEED:
        return {"type": float, "metavar": "GBIT/S"}
    return {"type": _cpus if option.kind == CPUS else int}


def _cpus(text: str) -> tuple[int, ...]:
    try:
        return parse_list(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{error}: write CPUs as in 0-15,32") from None


def _read(options: dict[str, Any], _env: Mapping[str, str]) -> int:
    print(json.dumps(asdict(find_machine(options["machine"])), indent=1))
    return 0


def _plan(options: dict[str, Any], env: Mapping[str, str]) -> int:
    spec, output_format, explain, share = (options.pop(name) for name in ("machine", "format", "explain", "share"))
    request = Request(**options)
    from cputrain.predict.next_best import compare_plan  # the other commands need no model

    if spec == "this":
        plan = plan_beside(request, env, share=share, compare=compare_plan)
    elif share:
        raise RequestError(NOT_SHARED)
    else:
        plan = plan_machine(find_machine(spec), request, compare=compare_plan)
    _print(plan, output_format, env, explained=explain)
    return 0


def _show(options: dict[str, Any], env: Mapping[str, str]) -> int:
    paths: list[Path] = options["plans"]
    if len(paths) > 2:
        raise InputError(f"{len(paths)} plans given: give one to show or two to compare")
    if options["pid"] and len(paths) > 1:
        raise InputError("--pid with two plans: give one plan, or none for the plan that has bound the process")
    if options["pid"] or not paths:
        plan = read_host_plan(paths[0]) if paths else None
        processes = running_processes(tuple(options["pid"] or ()), plan)
        print(binding_report(processes))
        return int(any(process.differs for process in processes))
    plans = [read_plan(path) for path in paths]
    if len(plans) == 2:
        print("\n".join(plan_differences(*plans)) or "the plans are the same")
    else:
        _print(plans[0], options["format"], env)
    return 0


def _print(plan: Plan, output_format: str, env: Mapping[str, str], *, explained: bool = False) -> None:
    if output_format == "json":
        print(plan_to_json(plan))
    elif output_format == "svg":
        print(plan_to_svg(plan, wording=as_option))
    else:
        print(plan_to_text(plan, colored=shows_color(sys.stdout, env), explained=explained, wording=as_option))


COMMANDS: dict[str, Callable[[dict[str, Any], Mapping[str, str]], int]] = {"read": _read, "plan": _plan, "show": _show}

if __name__ == "__main__":
    use_utf8()
    sys.exit(main(sys.argv[1:], os.environ))
