"""Errors that name settings: each caller words them for its users."""

import pytest

from cputrain.affinity.errors import BindingError, InputError, RequestError, RunError, as_option, describe
from cputrain.affinity.planner import Request, plan_machine
from cputrain.cli.words import as_recipe_key, wording_of
from tests.support.machines import build_machine


def test_a_request_that_does_not_fit_is_worded_as_fields_options_or_recipe_keys() -> None:
    with pytest.raises(RequestError) as refused:
        plan_machine(build_machine(2, 1, 24, 2), Request(ppn=64))
    fits = "host made has 48 available: set {0} to 48 or fewer, or let workers share cores with"
    for wording, ppn, name, oversubscribe in (
        (None, "ppn=64", "ppn", "oversubscribe=true"),
        (as_option, "--ppn 64", "--ppn", "--oversubscribe"),
        (as_recipe_key, "plan.ppn=64", "plan.ppn", "plan.oversubscribe=true"),
    ):
        message = str(refused.value) if wording is None else describe(refused.value, wording)
        assert message == f"{ppn} needs 64 cores; {fits.format(name)} {oversubscribe}"


def test_settings_have_the_names_of_the_command() -> None:
    batch = RequestError("set {local_batch} to 4 or fewer")
    assert describe(batch, wording_of(["train", "imagefolder"])) == "set batch.local to 4 or fewer"
    assert describe(batch, wording_of(["plan"])) == "set --local-batch (with a recipe: batch.local) to 4 or fewer"
    for arguments in (["launch"], ["train"], []):
        assert describe(BindingError("or {verify=false}"), wording_of(arguments)) == "or --no-verify"


def test_other_errors_keep_their_text() -> None:
    for error in (InputError("no {ppn} here"), RunError("no {ppn} here")):
        assert describe(error, as_option) == str(error) == "no {ppn} here"
    assert isinstance(RequestError(""), InputError) and isinstance(BindingError(""), RunError)
