"""`cputrain bench operators`."""

import os
from typing import TYPE_CHECKING, Any

import click

from cputrain.affinity.errors import InputError
from cputrain.affinity.topology.sysfs import this_machine
from cputrain.cli.output import amount_option, formats_option, number_option, only_results_on_stdout, show_report
from cputrain.launch.command import check_program, program, with_kernels
from cputrain.variables import KERNELS_VARIABLE

if TYPE_CHECKING:
    from cputrain.studies.bench.figures import Report
    from cputrain.studies.bench.operators import Measured

PROGRAM = "cputrain.program"  # in the context: the words after "--"
ROWS = 15
DEFAULTS = {"batch": 8, "size": 224, "precision": "float32", "threads": 0, "steps": 3}  # of a network's steps
LIMITS = {"seconds": 20.0, "after": 0.0}  # of a program's recording


class _ProgramCommand(click.Command):
    """A command whose words after "--" are a program's."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse the words before "--"."""
        at = args.index("--") if "--" in args else len(args)
        ctx.meta[PROGRAM] = tuple(args[at + 1 :])
        return super().parse_args(ctx, args[:at])


@click.command("operators", cls=_ProgramCommand)
@click.argument("network", required=False, metavar="[NETWORK | -- SCRIPT ARGS...]")
@number_option("--batch", help=f"NETWORK: train N images a step  [default: {DEFAULTS['batch']}]")
@number_option("--size", help=f"NETWORK: train images of N x N pixels  [default: {DEFAULTS['size']}]")
@click.option("--precision", type=click.Choice(["float32", "bf16"]), help="NETWORK: train in it  [default: float32]")
@number_option("--threads", help="NETWORK: train on N threads  [default: one for each core]")
@number_option("--steps", help=f"NETWORK: profile N steps  [default: {DEFAULTS['steps']}]")
@amount_option(
    "--seconds", above=0, metavar="S", help=f"SCRIPT: record for S seconds  [default: {LIMITS['seconds']:g}]"
)
@amount_option("--after", metavar="S", help="SCRIPT: leave out the first S seconds of operators  [default: 0]")
@click.option(
    "--kernels",
    type=click.Choice(["auto", "off"]),
    help="auto: register cputrain's kernels below torch's operators, as `cputrain launch` does  [default: "
    f"${KERNELS_VARIABLE}, else auto]",
)
@number_option("--rows", default=ROWS, help="print N rows of each table")
@click.option("--quick", is_flag=True, help="measure the limits with tiny sizes, to try the command")
@formats_option("json", "svg", help="choose the output; svg: bars beside their limits")
@click.pass_context
def operators_command(
    ctx: click.Context,
    /,
    network: str | None,
    rows: int,
    kernels: str | None,
    quick: bool,
    output_format: str,
    **given: Any,
) -> None:
    """Profile the operators of a network's training step, or of a program while it runs, each beside its limit.

    NETWORK is a classifier of torchvision, LIBRARY:NAME, or MODULE:NAME, a class or function of yours without
    arguments. It trains generated images, in turns with our kernels and without them. SCRIPT, or any other program,
    runs unchanged; recorded is the main thread of the process that computes most.

    An operator's limit is the larger of its FLOP at the speed of products and convolutions and of its bytes at that of
    a copy, both measured in the same run. Values that are still in the cache can be faster. "our kernel" names
    the one that has computed an operator.
    """
    words = ctx.meta[PROGRAM]
    _check(network, words, given)
    env = with_kernels((), os.environ, kernels)

    def show(measured: "Measured", threads: int) -> None:
        report = _report(measured, threads, rows, quick=quick)
        show_report(report, output_format)

    if words:
        command = program(words, module=False)
        check_program(command, env)
        from cputrain.studies.bench.profiled import check_ended, run_program

        with only_results_on_stdout("text" if output_format == "text" else "json"):
            ended = run_program(command, env, **_chosen(given, LIMITS))
        if ended.measured is not None:
            show(ended.measured, ended.threads)
        check_ended(ended, command)
        return
    from cputrain.studies.bench.profiled import Steps, measure_steps

    chosen = _chosen(given, DEFAULTS)
    threads = chosen.pop("threads") or len(this_machine().allowed_cores)
    steps = Steps(network=network or "", threads=threads, kernels=env[KERNELS_VARIABLE] == "auto", **chosen)
    with only_results_on_stdout("text" if output_format == "text" else "json"):
        measured = measure_steps(steps, env)
    show(measured, threads)


def _chosen(given: dict[str, Any], defaults: dict[str, Any]) -> dict[str, Any]:
    return {name: default if given[name] is None else given[name] for name, default in defaults.items()}


def _report(measured: "Measured", threads: int, rows: int, *, quick: bool) -> "Report":
    from cputrain.studies.bench.operators import dtypes_of, operators_report
    from cputrain.studies.bench.work import measured_rates

    rates = measured_rates(this_machine(), dtypes_of(measured), threads, quick=quick)
    return operators_report(measured, rates, rows)


def _check(network: str | None, words: tuple[str, ...], given: dict[str, Any]) -> None:
    """Raise InputError unless there is either a network or a program, with options for it."""
    if network is None and not words:
        raise InputError("nothing to profile: give a NETWORK such as resnet50, or -- SCRIPT ARGS")
    if network is not None and words:
        raise InputError(f"network {network} and program {words[0]} are both given: profile one of them")
    if network is not None and network.endswith(".py"):
        raise InputError(f"network {network} is a script: give it behind --, as in -- {network}")
    others, kind = (DEFAULTS, "a NETWORK") if words else (LIMITS, "a SCRIPT")
    if name := next((name for name in others if given[name] is not None), None):
        raise InputError(f"--{name} is for {kind}: remove it")
