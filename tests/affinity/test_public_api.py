"""`from cputrain import affinity`: the names that scripts rely on, and what the import costs."""

import doctest
import subprocess
import sys

import pytest

from cputrain import affinity

NAMES = {
    *("Machine", "Picture", "Plan", "Request", "Runtime", "WorkerPlan", "Workload", "InputError", "RunError"),
    *("find_machine", "machine_names", "find_runtime", "target_of", "plan_machine", "plan_to_json", "read_plan"),
    "bind_process",
}


def test_the_public_names_stay() -> None:
    assert set(affinity.__all__) == NAMES
    assert set(affinity.__all__) <= set(dir(affinity))
    for name in NAMES:
        assert getattr(affinity, name).__name__ == name
    with pytest.raises(AttributeError, match="no attribute 'plan_host'"):
        affinity.plan_host  # noqa: B018


def test_the_example_of_the_package_s_docstring_runs() -> None:
    failed, tried = doctest.testmod(affinity)
    assert (failed, tried) == (0, 3)


def test_a_notebook_shows_a_plan_and_a_terminal_prints_it() -> None:
    picture = affinity.Picture(affinity.plan_machine(affinity.find_machine("skx-8160-2s")))
    assert picture._repr_svg_().startswith("<svg") and "workers per host" in str(picture)


def test_importing_the_package_loads_none_of_its_modules() -> None:
    ours = "[name for name in sys.modules if name.startswith(('cputrain.affinity.', 'yaml'))]"
    code = f"import sys, cputrain; before = {ours}; import cputrain.affinity; print([*{{*{ours}}} - {{*before}}])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
