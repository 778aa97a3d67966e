"""Errors: each caller words the settings that they name, one line each, and the status that they end a program with."""

import errno

import pytest

from cputrain.affinity.__main__ import main
from cputrain.affinity.errors import (
    BindingError,
    DoesNotFitError,
    InputError,
    RequestError,
    RunError,
    as_argument,
    as_option,
    as_recipe_key,
    describe_error,
)
from cputrain.affinity.planner.plan import plan_machine
from cputrain.affinity.planner.request import Request
from cputrain.affinity.terminal import exit_status, one_line
from cputrain.affinity.wording import plural
from cputrain.cli.words import wording_of
from tests.support.machines import build_machine


def test_a_request_that_does_not_fit_is_worded_as_fields_options_or_recipe_keys() -> None:
    with pytest.raises(RequestError) as refused:
        plan_machine(build_machine(2, 1, 24, 2), Request(ppn=64))
    fits = "host made has 48 available: set {0} to 48 or fewer, or let workers share cores with"
    for wording, ppn, name, oversubscribe in (
        (None, "ppn=64", "ppn", "oversubscribe=true"),
        (as_option, "--ppn 64", "--ppn", "--oversubscribe"),
        (as_recipe_key, "plan.ppn=64", "plan.ppn", "plan.oversubscribe=true"),
        (as_argument, "plan.ppn=64", "plan.ppn", "plan.oversubscribe=true"),
    ):
        message = str(refused.value) if wording is None else describe_error(refused.value, wording)
        assert message == f"{ppn} needs 64 cores; {fits.format(name)} {oversubscribe}"


@pytest.mark.parametrize(("cores", "counted"), [(1, "1 core for computing"), (2, "2 cores for computing")])
def test_a_count_of_one_has_a_singular(cores: int, counted: str) -> None:
    with pytest.raises(RequestError, match=rf"leave none of worker 0's {counted}:"):
        plan_machine(build_machine(1, 1, cores, 1), Request(ppn=1, comm_cores=cores))
    assert (plural(1, "class"), plural(2, "class"), plural(2000, "rank")) == ("1 class", "2 classes", "2,000 ranks")


def test_settings_have_the_names_of_the_command() -> None:
    batch = RequestError("set {local_batch} to 4 or fewer")
    assert describe_error(batch, wording_of(["train", "imagefolder"])) == "set batch.local to 4 or fewer"
    assert describe_error(batch, wording_of(["plan"])) == "set --local-batch (with a recipe: batch.local) to 4 or fewer"
    assert describe_error(BindingError("or {verify=false}"), as_argument) == "or cputrain launch --no-verify"
    for arguments in (["launch"], ["train"], []):
        assert describe_error(BindingError("or {verify=false}"), wording_of(arguments)) == "or --no-verify"


def test_other_errors_keep_their_text() -> None:
    for error in (InputError("no {ppn} here"), RunError("no {ppn} here")):
        assert describe_error(error, as_option) == str(error) == "no {ppn} here"
    assert isinstance(RequestError(""), InputError) and isinstance(BindingError(""), RunError)


@pytest.mark.parametrize(
    ("error", "status", "line"),
    [
        (InputError("ppn=64 needs 64 cores"), 2, "ppn=64 needs 64 cores"),
        (DoesNotFitError("needs 9 GiB", largest=3), 2, "needs 9 GiB"),
        (RunError("rank 1 exited"), 1, "rank 1 exited"),
        (OSError(errno.ENOSPC, "No space left on device", "x.pt"), 1, "x.pt: No space left on device: "),
    ],
)
def test_an_error_that_users_can_mend_is_one_line_and_a_status(
    error: Exception, status: int, line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert exit_status(error, "program") == status
    printed = capsys.readouterr().err
    assert printed.startswith(f"program: {line}") and printed.count("\n") == 1


def test_a_bug_is_raised_again_and_prints_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    bug = KeyError("x")
    assert one_line(bug) is None and one_line(FileNotFoundError(errno.ENOENT, "No such file", "x")) is None
    with pytest.raises(KeyError) as raised:
        exit_status(bug, "program")
    assert raised.value is bug and not capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("plan --cores abc", "--cores: bad range 'abc' in CPU list 'abc': write CPUs as in 0-15,32"),
        ("plan --ppn x", "--ppn: not a whole number: 'x'"),
        ("plan --link-gbit fast", "--link-gbit: not a number: 'fast'"),
        ("plan --balance none", "--balance: invalid choice: 'none' (choose from"),
        ("plan --machine", "--machine: expected one argument"),
        ("plan --bogus", "unrecognized arguments: --bogus"),
        ("prepare", "command: invalid choice: 'prepare' (choose from"),
        ("show --pid x", "--pid: not a whole number: 'x'"),
        ("bind -- true", "one of the arguments --plan --plan-here is required"),
        ("bind --plan plan.json", "the following arguments are required: command"),
        ("bind --plan plan.json --local-rank x -- true", "--local-rank: not a whole number: 'x'"),
    ],
)
def test_wrong_options_of_the_module_are_one_line(
    arguments: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments.split(), {}) == 2
    printed = capsys.readouterr()
    assert said in printed.err and printed.err.count("\n") == 1 and printed.err.endswith(" --help\n")
    assert printed.out == ""
