"""From errors to exit statuses."""

import errno

import pytest

from cputrain.affinity.__main__ import main
from cputrain.affinity.errors import DoesNotFitError, InputError, RunError
from cputrain.affinity.terminal import exit_status, one_line


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
        ("plan --cores abc", "--cores: bad range 'abc' in CPU list 'abc': give CPUs as in 0-15,32"),
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
