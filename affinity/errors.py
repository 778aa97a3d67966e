"""The two ways a command ends badly, told apart by exit status."""


class InputError(Exception):
    """The user's input is wrong (exit status 2): one line that says what was asked, what was found, what to do next."""


class DoesNotFitError(InputError):
    """A batch needs more memory than a worker has; `largest` is the largest local batch that fits, 0: none."""

    def __init__(self, told: str, *, largest: int) -> None:
        super().__init__(told)
        self.largest = largest


class RunError(Exception):
    """It failed while running (exit status 1): it names rank, host, signal and log where known."""
