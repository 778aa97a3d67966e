"""The checks before a job: of made-up reports, and of real hosts that are network namespaces."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from affinity.planner.plan import Request, plan_machine
from affinity.planner.runtime import Runtime
from affinity.planner.workload import RESNET50
from mpi.preflight.checks import HostReport, compare_hosts, missing_provider
from tests.mpi.test_remote import launch_on
from tests.support.commands import need
from tests.support.fake_hosts import fake_hosts
from tests.support.machines import build_machine

PLAN = plan_machine(build_machine(1, 1, 4, 1), Request(ppn=2, workload=RESNET50, local_batch=4), Runtime())
HOST = HostReport(
    host="h1",
    python="3.11.7",
    packages=(("torch", "2.13.0"),),
    files=(("/x/train.py", "aa"),),
    clock_s=0.0,
    memory_bytes=64 << 30,
    scratch_bytes=64 << 30,
    allowed_pus=(0, 1, 2, 3),
    link_gbit=10.0,
)


def findings_with(**changes: object) -> tuple[list[str], list[str]]:
    """Errors and warnings about four equal hosts, the third of which is changed."""
    reports = [replace(HOST, host=f"h{i}") for i in (1, 2, 3, 4)]
    reports[2] = replace(reports[2], **changes)
    findings = compare_hosts(reports, {report.host: PLAN for report in reports})
    return findings.errors, findings.warnings


def test_equal_hosts_pass() -> None:
    assert findings_with() == ([], [])


@pytest.mark.parametrize(
    ("changes", "error", "warning"),
    [
        ({"packages": (("torch", "2.8.0"),)}, "h3 has torch 2.8.0, most hosts have 2.13.0", ""),
        ({"packages": ()}, "h3 has torch none", ""),
        ({"python": "3.12.1"}, "h3 has Python 3.12.1", ""),
        ({"files": (("/x/train.py", "bb"),)}, "h3 has /x/train.py bb, most hosts have aa", ""),
        ({"allowed_pus": (0, 1)}, "h3 does not allow CPUs 2-3", ""),
        ({"memory_bytes": 1 << 30}, "h3 has 1.0 GiB of memory free", ""),
        ({"clock_s": -7.25}, "", "h3's clock is -7.2 s off"),
        ({"scratch_bytes": 0}, "", "h3 has 0.0 GiB free in its temporary folder"),
        ({"link_gbit": 1.0}, "", "h3 sends 1.00 Gbit/s"),
        ({"no_provider": "psm3"}, "", "h3's libfabric has no provider psm3"),
    ],
)
def test_a_host_that_differs_is_named(changes: dict, error: str, warning: str) -> None:
    errors, warnings = findings_with(**changes)
    assert len(errors) == bool(error) and all(error in line for line in errors)
    assert len(warnings) == bool(warning) and all(warning in line for line in warnings)


def test_hosts_are_checked_before_a_job(tmp_path: Path) -> None:
    """Three equal hosts; then one with a slow cable; then one that does not answer at all."""
    with fake_hosts(tmp_path / "hosts", 3) as hosts:

        def launched(name: str, *options: str) -> subprocess.CompletedProcess[str]:
            argv = launch_on(
                hosts, "openmpi4", *options, "--", sys.executable, "-c", "print('ran')", cwd=tmp_path / name
            )
            return subprocess.run(argv, capture_output=True, text=True, timeout=120)

        good = launched("a")
        assert good.returncode == 0 and good.stdout.count("ran") == 3 * 2, good.stderr
        assert "pre-flight: 3 hosts checked in" in good.stderr
        hosts.slow_down("h2", "50mbit")
        slow = launched("b")
        assert slow.returncode == 0
        assert "pre-flight: h2 sends 0.0" in slow.stderr, slow.stderr
        hosts.cut("h3")
        lost = launched("c")
        assert lost.returncode == 1 and "ran" not in lost.stdout
        assert "no answer from h3" in lost.stderr, lost.stderr


def test_a_missing_provider_is_found_by_the_real_fi_info() -> None:
    need("libfabric-bin", "fi_info")
    assert missing_provider("tcp") is None and missing_provider("tcp;shm") is None
    assert missing_provider("tcp;mlx") == "mlx"
    assert missing_provider("^mlx") is None and missing_provider(None) is None
