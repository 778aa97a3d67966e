"""From errors to exit statuses."""

import errno

import pytest

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
