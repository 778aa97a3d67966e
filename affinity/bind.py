"""`python -m cputrain.affinity.bind --plan plan.json -- python train.py`: bind this process, then exec a command.

Binds, verifies, exports the worker's environment and torch.distributed's env:// variables, and execs the command.
"""

from cputrain.affinity.start import isolate

if __name__ == "__main__":
    isolate()

import argparse
import logging
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import NoReturn

from cputrain.affinity.binding import OTHER_LAYOUT_VARIABLE, check_layout
from cputrain.affinity.bound_plan import exec_bound, plan_in_memory, read_host_plan
from cputrain.affinity.errors import InputError, as_option
from cputrain.affinity.planner.plan import Plan, Request
from cputrain.affinity.planner.plan_file import request_from_json, worker_of
from cputrain.affinity.planner.records import plan_this_machine
from cputrain.affinity.rank import LOCAL_RANK_VARIABLES, local_rank_of, rank_from_env
from cputrain.affinity.terminal import exit_status
from cputrain.affinity.topology.sysfs import this_machine


class Parser(argparse.ArgumentParser):
    """Argument parser whose errors are one-line InputErrors: the argument, what is wrong with it, how to get help."""

    def error(self, message: str) -> NoReturn:
        """Raise InputError instead of printing the usage and exiting."""
        reason = message.removeprefix("argument ").replace("invalid int value: ", "not a whole number: ")
        reason = reason.replace("invalid float value: ", "not a number: ")
        raise InputError(f"{reason}: see {self.prog} --help")


def main(arguments: list[str], env: Mapping[str, str]) -> int:
    """Run the command line of `python -m cputrain.affinity.bind`; return only if the command cannot be started."""
    logging.basicConfig(format="affinity: %(message)s")
    try:
        _bind(_parser().parse_args(arguments), env)
    except Exception as error:  # noqa: BLE001  bugs are raised again
        return exit_status(error, "cputrain.affinity.bind", as_option)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = Parser(prog="python -m cputrain.affinity.bind", description="bind as planned, then run a command")
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--plan", type=Path, help="plan.json written by cputrain plan")
    source.add_argument("--plan-here", metavar="JSON", help="plan this host by this request, which includes ppn")
    parser.add_argument("--local-rank", type=int, help="worker of the plan; default: from the launcher's variables")
    parser.add_argument(
        "--bound", action="store_true", help="check that the launcher has bound this process as planned"
    )
    parser.add_argument("--no-verify", action="store_true", help="continue if the binding differs from the plan")
    parser.add_argument(
        "--allow-other-layout",
        action="store_true",
        help="continue if this host's cores, caches or NUMA nodes differ from the plan's; same as "
        f"{OTHER_LAYOUT_VARIABLE}=1",
    )
    parser.add_argument("--keep-env", action="store_true", help="inherited variables take precedence over the plan's")
    parser.add_argument("command", nargs="+", help="-- CMD...")
    return parser


def _bind(options: argparse.Namespace, env: Mapping[str, str]) -> None:
    rank = rank_from_env(env)
    local_rank = options.local_rank
    if local_rank is None:
        local_rank = rank.local_rank if rank else local_rank_of(env)
    if local_rank is None:
        raise InputError(f"no local rank: {', '.join(LOCAL_RANK_VARIABLES)} are all unset; set --local-rank")
    command = tuple(options.command)
    path = options.plan or plan_in_memory(_plan_here(request_from_json(options.plan_here), command, env))
    plan = read_host_plan(path)
    allowed = options.allow_other_layout or env.get(OTHER_LAYOUT_VARIABLE) == "1"
    if options.plan and not (options.no_verify or allowed):
        check_layout(plan, this_machine())
    exec_bound(
        worker_of(plan, local_rank),
        path,
        command,
        env,
        rank=rank,
        check=not options.no_verify,
        keep_env=options.keep_env,
        bound=options.bound,
    )


def _plan_here(request: Request, command: tuple[str, ...], env: Mapping[str, str]) -> Plan:
    """Plan this host as the launcher has planned it."""
    from cputrain.predict.next_best import compare_plan  # ranks that only read a plan need no model

    return plan_this_machine(request, env, command, compare=compare_plan)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], os.environ))
