"""The checks of a host and of what is installed, and the facts of a bug report."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from cputrain import doctor
from cputrain.affinity import bound_plan
from cputrain.affinity.planner.openmp import Runtime
from cputrain.affinity.rank import LAUNCHER_VARIABLES, PREFIXES
from cputrain.affinity.topology.catalog import named_machine
from cputrain.affinity.topology.machine import Machine
from cputrain.cli import main
from cputrain.doctor import PARTS, probe_results
from cputrain.host_checks import (
    ERROR,
    OK,
    WARNING,
    Check,
    ProcessLimits,
    checks_text,
    control_groups,
    current_limits,
    error,
    governor,
    host_checks,
    locked_memory,
    ok,
    process_limits,
    processor_check,
    reserved_huge_pages,
    shared_memory,
    transparent_huge_pages,
    warning,
)
from cputrain.variables import HIDDEN, shown_variables
from tests.cputrain.test_json_output import fields
from tests.support.commands import here

PLENTY = ProcessLimits(locked_bytes=-1, address_bytes=-1, files=65536, processes=-1)
LATE = {"error": "no answer after 2 s, as on a slow disk or a busy host", "late": True}


def written(root: Path, name: str, text: str) -> Path:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return root


@pytest.mark.parametrize(
    ("files", "status"),
    [
        ({}, OK),
        ({"cpu0/cpufreq/scaling_governor": "performance\n"}, OK),
        ({"cpu0/cpufreq/scaling_governor": "powersave\n"}, WARNING),
        (
            {
                "cpu0/cpufreq/scaling_governor": "powersave\n",
                "cpu0/cpufreq/energy_performance_preference": "performance\n",
            },
            OK,
        ),
    ],
)
def test_the_clock_governor(tmp_path: Path, files: dict[str, str], status: str) -> None:
    for name, text in files.items():
        written(tmp_path, f"sys/devices/system/cpu/{name}", text)
    assert governor(tmp_path).status == status


@pytest.mark.parametrize(("text", "status"), [("always [madvise] never", OK), ("always madvise [never]", WARNING)])
def test_transparent_huge_pages(tmp_path: Path, text: str, status: str) -> None:
    found = transparent_huge_pages(written(tmp_path, "sys/kernel/mm/transparent_hugepage/enabled", text))
    assert found.status == status and bool(found.remedy) == (status == WARNING)


def test_huge_pages_that_nobody_uses(tmp_path: Path) -> None:
    meminfo = "MemTotal: 1000000 kB\nHugePages_Total: {0}\nHugePages_Free: {0}\nHugepagesize: 2048 kB\n"
    assert reserved_huge_pages(written(tmp_path, "proc/meminfo", meminfo.format(0))).status == OK
    found = reserved_huge_pages(written(tmp_path, "proc/meminfo", meminfo.format(200)))
    assert found.status == WARNING and "400 MiB unused" not in found.remedy and "vm.nr_hugepages=0" in found.remedy


def with_limits(**limits: object) -> Machine:
    return replace(named_machine("skx-8160-1s"), **limits)  # type: ignore[arg-type]


def test_limits_of_control_groups() -> None:
    assert {check.status for check in control_groups(with_limits())} == {OK}
    cpus, memory = control_groups(with_limits(cpu_quota=2.5, memory_limit_bytes=1 << 30))
    assert cpus.status == WARNING and "24 of 24 cores, limited to the time of 2.5 CPUs" in cpus.found
    assert memory.status == WARNING and "allows 1 GiB" in memory.found


def test_no_cpu_isolated_cpus_and_contradictions_are_not_ok() -> None:
    none, *_ = control_groups(with_limits(allowed_pus=()))
    assert none.status == ERROR and none.found == "0 of 24 cores"
    _, isolated, _ = control_groups(with_limits(isolated_pus=(2, 3)))
    assert (
        isolated.status == WARNING and isolated.found.startswith("2-3 (isolcpus)") and "--cores 2-3" in isolated.remedy
    )
    _, contradiction, _ = control_groups(with_limits(warnings=("cpu/online lists others",)))
    assert (contradiction.status, contradiction.found) == (WARNING, "cpu/online lists others")


def test_the_processor_and_what_a_virtual_machine_hides() -> None:
    assert processor_check(named_machine("skx-8160-1s"), virtual=False).status == OK
    assert processor_check(named_machine("bdw-e5-2699v4-1s"), virtual=False).status == OK
    hidden = processor_check(named_machine("bdw-e5-2699v4-1s"), virtual=True)
    assert hidden.status == WARNING and "-cpu host" in hidden.remedy
    assert processor_check(with_limits(isa=()), virtual=False).status == ERROR


@pytest.mark.parametrize(
    ("fabric", "locked", "status"), [("ib", 65536, ERROR), ("ib", -1, OK), ("ethernet", 65536, OK)]
)
def test_locked_memory_matters_to_networks_that_pin_it(fabric: str, locked: int, status: str) -> None:
    limits = ProcessLimits(locked_bytes=locked, address_bytes=-1, files=1, processes=1)
    assert locked_memory(limits, fabric).status == status


def test_few_files_processes_or_shared_memory_are_warned_of() -> None:
    tight = ProcessLimits(locked_bytes=-1, address_bytes=1 << 33, files=1024, processes=100)
    assert [check.status for check in process_limits(tight)] == [WARNING] * 3
    assert [check.status for check in process_limits(PLENTY)] == [OK] * 2
    assert shared_memory(64 << 20).status == WARNING and "--shm-size" in shared_memory(64 << 20).remedy
    assert shared_memory(None).status == ERROR and shared_memory(8 << 30).status == OK


def test_a_damaged_tree_is_an_error_and_the_other_checks_go_on(tmp_path: Path) -> None:
    checks = {check.name: check for check in host_checks(tmp_path, PLENTY, 8 << 30)}
    assert checks["processor"].status == ERROR and "no online CPU" in checks["processor"].found
    assert checks["/dev/shm"].status == OK


def test_torch_that_cannot_be_imported_or_not_in_time() -> None:
    broken = doctor.torch_check({"error": "ImportError: libgomp.so.1: cannot open shared object file"})
    assert broken.status == ERROR and "--force-reinstall 'torch" in broken.remedy and "torch" in broken.found
    assert doctor.torch_check(LATE).status == WARNING
    torch = {"version": "2.13.0+cpu", "cuda": None, "capability": "AVX512", "onednn": True, "import_s": 1.0}
    assert doctor.torch_check(torch).status == OK
    assert doctor.torch_check({**torch, "onednn": False}).status == ERROR


def test_a_bound_process_that_ends_while_doctor_looks_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    gone = subprocess.Popen(["true"])
    gone.wait()
    monkeypatch.setattr(bound_plan, "planned_environments", lambda: {gone.pid: {}})
    check = doctor.binding_check()
    assert (check.status, check.found) == (OK, "none is running")


def test_a_torchvision_of_another_build_is_named_with_its_cure(monkeypatch: pytest.MonkeyPatch) -> None:
    versions = {"torch": "torch 2.13.0+cpu", "torchvision": "torchvision 0.28.0"}
    monkeypatch.setattr(doctor, "installed", versions.__getitem__)
    nms = {"error": "RuntimeError: operator torchvision::nms does not exist"}
    found = doctor.torchvision_check(nms, {"version": "2.13.0+cpu"})
    assert found.status == WARNING and "torchvision::nms" in found.found and "'torchvision==0.28.*'" in found.remedy
    monkeypatch.setattr(doctor, "built_for", {"torch": "cpu", "torchvision": "cu130"}.__getitem__)
    late = doctor.torchvision_check(LATE, LATE)
    assert late.status == WARNING and "torchvision is built for cu130" in late.found and "0.28" in late.remedy
    monkeypatch.setattr(doctor, "built_for", lambda name: "cpu")
    assert doctor.torchvision_check(LATE, LATE).status == OK
    assert doctor.torchvision_check(nms, {"error": "ImportError"}).found == "not tried, as torch cannot be imported"


def test_the_other_libraries(tmp_path: Path) -> None:
    plain = [check.status for check in doctor.runtime_checks(Runtime(missing=("libjemalloc.so",)))]
    assert plain == [OK, WARNING, WARNING]
    assert [check.status for check in doctor.runtime_checks(Runtime(allocator="tcmalloc"))] == [OK, OK]
    assert doctor.compiler_check(None).status == WARNING
    missing = {"error": "InputError: comm.backend=ccl: oneCCL is not installed: pip install it"}
    cache = ok("cache", "")
    assert "gloo communicates: oneCCL is not installed" in doctor.oneccl_check(missing, cache).found
    found = {"version": "2021.13", "compiled": None, "library": "x"}
    assert "not compiled yet" in doctor.oneccl_check(found, cache).found
    without = doctor.oneccl_check(found, warning("cache", "full", "set CPUTRAIN_CACHE"))
    assert (without.status, without.remedy) == (WARNING, "set CPUTRAIN_CACHE") and "gloo" in without.found
    assert doctor.oneccl_check({**found, "compiled": "x.so"}, without).status == OK
    assert doctor.launcher_check({"error": "InputError: no mpirun on PATH"}).status == WARNING
    assert doctor.fabric_check("ethernet", {"FI_PROVIDER": "^psm3"}).status == OK
    unknown = doctor.fabric_check("ethernet", {"FI_PROVIDER": "psm3", "PATH": str(tmp_path)})
    assert unknown.status == OK and "not checked, as no fi_info here lists providers" in unknown.found


def test_what_an_import_prints_or_dies_of_is_no_answer() -> None:
    printing = "print('hello'); print('[1]'); print('{\"launcher\": {\"name\": \"x\"}}'); import os; os.abort()"
    started = subprocess.Popen([sys.executable, "-u", "-c", printing], stdout=subprocess.PIPE)
    found = probe_results(started, 60)
    assert found["launcher"] == {"name": "x"}
    assert found["decoder"]["error"] == "the import ended with SIGABRT"
    assert found["torch"]["error"] == "not reached: the import ended with SIGABRT" and set(found) == set(PARTS)


def test_an_import_that_takes_too_long_is_given_up() -> None:
    sleeping = subprocess.Popen(
        [sys.executable, "-c", "import time; time.sleep(600)"], stdout=subprocess.PIPE, start_new_session=True
    )
    found = probe_results(sleeping, 0.2)
    assert all(part["late"] and "no answer after 0.2 s" in part["error"] for part in found.values())
    assert sleeping.returncode == -9


def test_the_lines_and_the_summary() -> None:
    text = checks_text((ok("a", "fine"), warning("long name", "slow", "do this"), error("b", "broken", "do that")))
    assert "ok       a          fine" in text and "-> do this" in text
    assert text.endswith("1 ok, 1 warning, 1 error\nnext: b: do that")
    assert checks_text((ok("a", "fine"), warning("b", "slow", "do this"))).endswith("\nnext: cputrain plan")


@pytest.mark.slow
def test_doctor_as_json_has_every_check_once_and_its_status(capsys: pytest.CaptureFixture[str]) -> None:
    found = json.loads(_run_doctor(capsys, "doctor", "--format", "json"))
    assert set(found) == fields("doctor")
    names = [check["name"] for check in found["checks"]]
    assert len(names) == len(set(names)) and {"processor", "torch", "oneCCL", "launcher", "/dev/shm"} <= set(names)
    assert found["status"] == int(any(check["status"] == ERROR for check in found["checks"]))
    assert all(bool(check["remedy"]) == (check["status"] != OK) for check in found["checks"])


def _run_doctor(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(list(words)) in (0, 1)
    return capsys.readouterr().out


def test_env_tells_what_a_bug_report_needs_and_no_secret() -> None:
    secrets = {"SLURM_JWT": "s3cret", "CCL_KVS_TOKEN": "s3cret", "FI_PROVIDER": "tcp", "OMP_NUM_THREADS": "3"}
    result = here("env", "--format", "json", **secrets)
    assert result.returncode == 0 and "s3cret" not in result.stdout + result.stderr
    found = json.loads(result.stdout)
    assert set(found) == fields("env")
    assert {"cputrain", "python", "system", "cpu", "memory", "packages", "libraries", "variables"} <= set(found)
    assert found["variables"]["SLURM_JWT"] == HIDDEN and found["variables"]["FI_PROVIDER"] == "tcp"
    assert found["packages"]["torch"] and set(PARTS) <= set(found["libraries"])


def test_variables_that_matter_are_shown_and_secrets_are_not() -> None:
    env = {
        "OMP_NUM_THREADS": "4",
        "HOME": "/home/me",
        "TORCH_HOME": "http://me:hidden@host/x",
        "SLURM_JWT": "hidden",
        "SLURM_JOB_ID": "17",
        "I_MPI_AUTH_KEY": "hidden",
        "CPUTRAIN_JOB_TOKEN": "hidden",
        "KMP_AFFINITY": "compact",
    }
    shown = shown_variables(env)
    assert "hidden" not in "".join(shown.values()) and "HOME" not in shown
    assert shown["OMP_NUM_THREADS"] == "4" and shown["SLURM_JOB_ID"] == "17" and shown["KMP_AFFINITY"] == "compact"
    assert shown["TORCH_HOME"].endswith("@host/x") and shown["SLURM_JWT"] == HIDDEN


def test_the_variables_of_every_launcher_are_shown() -> None:
    names = {name for each in LAUNCHER_VARIABLES for name in each.rank_names} | {f"{prefix}X" for prefix in PREFIXES}
    assert set(shown_variables(dict.fromkeys(names, "1"))) == names


def test_the_limits_of_this_process_are_read() -> None:
    limits = current_limits()
    assert limits.files > 0 and isinstance(ok("a", "b"), Check)
