from dataclasses import replace
from pathlib import Path

from cputrain.affinity.errors import as_option
from cputrain.affinity.planner.plan import Plan
from cputrain.affinity.planner.plan_file import plan_to_json
from cputrain.affinity.views import plan_differences
from tests.support.commands import here, refused
from tests.support.machines import build_machine, planned


def plan(**fields: object) -> Plan:
    return planned(build_machine(2, 1, 24, 2), nodes=4, **fields)


def test_equal_plans_do_not_differ() -> None:
    assert plan_differences(plan(), plan()) == []


def test_changes_are_listed_by_worker() -> None:
    lines = plan_differences(plan(), plan(threads=20))
    assert "worker 0 intra_op: 22 -> 20" in lines
    assert "worker 1 OMP_NUM_THREADS: 22 -> 20" in lines
    assert "intra-op threads: 22 -> 20 (set by the recipe or an option)" in lines
    assert "unused CPUs threads=20 leaves them out: none -> 22-23,46-47,70-71,94-95" in lines


def test_workers_come_and_go() -> None:
    lines = plan_differences(plan(ppn=2), plan(ppn=4))
    assert "worker 3: added on CPUs 36-47,84-85 with 10 threads" in lines
    assert "worker 2: removed" in plan_differences(plan(ppn=4), plan(ppn=2))


def test_machines_differ_too() -> None:
    a = plan()
    b = replace(a, machine=replace(a.machine, name="other"))
    assert plan_differences(a, b) == ["machine name: made -> other"]


def test_on_the_command_line(tmp_path: Path) -> None:
    for name, made in (("a", plan()), ("b", plan(threads=20))):
        (tmp_path / f"{name}.json").write_text(plan_to_json(made))
    shown = here("plan", "--diff", "a.json", "b.json", cwd=tmp_path)
    assert (shown.returncode, shown.stdout.splitlines()) == (
        0,
        plan_differences(plan(), plan(threads=20), wording=as_option),
    )
    assert here("plan", "--diff", "a.json", "a.json", cwd=tmp_path).stdout == "the plans are the same\n"
    shown = refused(here("plan", "--diff", "a.json", "absent.json", cwd=tmp_path))
    assert "cannot read the plan absent.json" in shown
