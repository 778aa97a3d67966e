"""The OpenMP runtime and the allocator that a Python loads: in made-up folders, and for this Python."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from cputrain.affinity.errors import DoesNotFitError, InputError
from cputrain.affinity.planner.openmp import Runtime, TargetPython, find_runtime, target_of, with_libiomp5
from cputrain.affinity.planner.plan import plan_machine
from cputrain.affinity.planner.plan_file import plan_to_json
from cputrain.affinity.planner.request import Request
from cputrain.affinity.planner.workload import CUDA_BYTES, PROCESS_BYTES, RESNET50, footprint
from cputrain.affinity.topology.sysfs import this_machine
from tests.support.machines import build_machine


def test_libraries_are_found_in_order(tmp_path: Path) -> None:
    target = TargetPython(prefix=tmp_path, torch_lib=None)
    lib = tmp_path / "lib"
    lib.mkdir()
    assert find_runtime(target, {}, ()) == Runtime(origin=f"assumed: no torch in {tmp_path}")
    (lib / "libjemalloc.so.2").touch()
    assert find_runtime(target, {}, ()).allocator == "jemalloc"
    (lib / "libtcmalloc_minimal.so.4").touch()
    (lib / "libiomp5.so").touch()
    found = find_runtime(target, {}, ())
    assert (found.openmp, found.allocator) == ("libiomp5", "tcmalloc")
    assert found.preload == (str(lib / "libiomp5.so"), str(lib / "libtcmalloc_minimal.so.4"))


def test_what_torch_brings_is_not_preloaded(tmp_path: Path) -> None:
    torch_lib = tmp_path / "site/torch/lib"
    torch_lib.mkdir(parents=True)
    target = TargetPython(prefix=tmp_path, torch_lib=torch_lib)
    assert find_runtime(target, {}, ()).origin == "the system's"
    (torch_lib / "libgomp.so.1").touch()
    assert find_runtime(target, {}, ()) == Runtime(origin=f"{torch_lib}/libgomp.so.1, loaded by torch")
    (torch_lib / "libiomp5.so").touch()
    found = find_runtime(target, {}, ())
    assert (found.openmp, found.preload) == ("libiomp5", ())


def test_what_the_user_preloads_counts(tmp_path: Path) -> None:
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib/libjemalloc.so.2").touch()
    for name in ("libiomp5.so", "libtcmalloc.so.4.5"):
        (tmp_path / name).touch()
    target = TargetPython(prefix=tmp_path, torch_lib=None)
    env = {"LD_PRELOAD": f"{tmp_path}/libiomp5.so {tmp_path}/libtcmalloc.so.4.5"}
    found = find_runtime(target, env, ())
    assert (found.openmp, found.allocator, found.preload, found.missing) == ("libiomp5", "tcmalloc", (), ())
    by_name = {"LD_PRELOAD": "libiomp5.so", "LD_LIBRARY_PATH": f"/nowhere:{tmp_path}"}
    assert find_runtime(target, by_name, ()).openmp == "libiomp5"


def test_a_cuda_build_of_torch_takes_more_memory(tmp_path: Path) -> None:
    (tmp_path / "torch/lib").mkdir(parents=True)
    target = TargetPython(prefix=tmp_path, torch_lib=tmp_path / "torch/lib")
    plain = find_runtime(target, {}, ())
    (tmp_path / "torch/lib/libtorch_cuda.so").touch()
    cuda = find_runtime(target, {}, ())
    assert (plain.cuda, cuda.cuda) == (False, True)
    assert not find_runtime(TargetPython(prefix=tmp_path, torch_lib=None), {}, ()).cuda
    machine = build_machine(1, 1, 8, 1)
    for known in (RESNET50, replace(RESNET50, assumed=False)):
        request = Request(ppn=2, local_batch=4, workload=known)
        small, large = (plan_machine(machine, request, runtime) for runtime in (plain, cuda))
        more = [b.memory_bytes - a.memory_bytes for a, b in zip(small.workers, large.workers, strict=True)]  # type: ignore[operator]
        assert more == [CUDA_BYTES] * 2 and large.request == small.request
        (shown,) = (reason.numbers["process"] for reason in large.reasons if reason.what == "memory per worker")
        assert shown == PROCESS_BYTES + CUDA_BYTES
    need = footprint(plain.holds(known), 4).total
    tight = replace(machine, memory_limit_bytes=2 * need + CUDA_BYTES)
    plan_machine(tight, Request(ppn=2, local_batch=4, workload=known), plain)
    with pytest.raises(DoesNotFitError):
        plan_machine(tight, Request(ppn=2, local_batch=4, workload=known), cuda)


def test_preloaded_libraries_that_do_not_exist_do_not_count(tmp_path: Path) -> None:
    target = TargetPython(prefix=tmp_path, torch_lib=None)
    env = {"LD_PRELOAD": "/nowhere/libiomp5.so:libtcmalloc.so.4:/nowhere/their.so"}
    found = find_runtime(target, env, ())
    assert (found.openmp, found.allocator) == ("libgomp", "glibc")
    assert found.missing == ("/nowhere/libiomp5.so", "libtcmalloc.so.4")
    plan = plan_machine(build_machine(1, 1, 8, 1), Request(), found)
    assert "/nowhere/libiomp5.so in LD_PRELOAD does not exist" in plan.warnings[0]
    assert "OMP_PLACES" in dict(plan.workers[0].env)


def test_a_requested_runtime_that_is_missing_is_an_error_that_names_the_package(tmp_path: Path) -> None:
    (tmp_path / "torch/lib").mkdir(parents=True)
    (tmp_path / "torch/lib/libgomp.so.1").touch()
    target = TargetPython(prefix=tmp_path, torch_lib=tmp_path / "torch/lib")
    with pytest.raises(InputError, match=r"loads libgomp: pip install intel-openmp, or export LD_PRELOAD="):
        find_runtime(target, {}, (), openmp="libiomp5")
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib/libiomp5.so").touch()
    assert find_runtime(target, {}, (), openmp="libiomp5").preload == (f"{tmp_path}/lib/libiomp5.so",)
    assert find_runtime(target, {}, (), openmp="libgomp").openmp == "libgomp"
    env = {"LD_PRELOAD": f"{tmp_path}/lib/libiomp5.so"}
    with pytest.raises(InputError, match="remove it from LD_PRELOAD"):
        find_runtime(target, env, (), openmp="libgomp")


def test_a_rank_warns_of_a_plan_for_libiomp5_that_it_does_not_load(tmp_path: Path) -> None:
    """A plan made for another machine; this Python has torch's libgomp, and no libiomp5."""
    if find_runtime(target_of(()), {}).openmp != "libgomp":
        pytest.skip(reason="needs a Python whose torch loads libgomp")
    plan = plan_machine(this_machine(), Request(ppn=1, openmp="libiomp5"), Runtime())
    (tmp_path / "plan.json").write_text(plan_to_json(plan))
    argv = [sys.executable, "-m", "cputrain.affinity.bind", "--plan", "plan.json", "--local-rank", "0", "--", "true"]
    env = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
    done = subprocess.run(argv, cwd=tmp_path, capture_output=True, text=True, env=env)
    assert done.returncode == 0 and "the plan's KMP_ variables have no effect" in done.stderr
    assert "pip install intel-openmp" in done.stderr


def test_a_rank_preloads_its_own_host_s_libiomp5_for_a_plan_made_elsewhere(tmp_path: Path) -> None:
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib/libiomp5.so").touch()
    python = tmp_path / "python3"
    python.write_text(f"#!/bin/sh\necho {tmp_path}\necho\n")
    python.chmod(0o755)
    env = with_libiomp5({"LD_PRELOAD": "their.so"}, (str(python),))
    assert env == {"LD_PRELOAD": f"{tmp_path}/lib/libiomp5.so:their.so"}
    assert with_libiomp5(env, (str(python),)) == env


def test_the_found_runtime_is_the_one_that_this_torch_loads() -> None:
    """Load torch in a process of its own and look at what the kernel has mapped."""
    found = find_runtime(target_of(()), {}, ())
    code = "import torch; print(open('/proc/self/maps').read())"
    maps = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    loaded = {Path(line.split(maxsplit=5)[-1]) for line in maps.splitlines() if "omp" in line.rpartition("/")[2]}
    path = Path(found.origin.split(",")[0])
    assert path in loaded, (found, loaded)
    assert found.openmp == ("libiomp5" if any("iomp" in p.name for p in loaded) else "libgomp")


def test_another_python_is_run_to_find_its_torch(tmp_path: Path) -> None:
    other = tmp_path / "python3"
    other.write_text("#!/bin/sh\necho /opt/env\necho /opt/env/lib/python3/site-packages/torch/__init__.py\n")
    other.chmod(0o755)
    target = target_of((str(other), "train.py"))
    assert target == TargetPython(
        prefix=Path("/opt/env"), torch_lib=Path("/opt/env/lib/python3/site-packages/torch/lib")
    )
    for script, said in {"exit 3": "status 3", "echo two >&2; echo lines >&2; exit 1": "lines"}.items():
        other.write_text(f"#!/bin/sh\n{script}\n")
        with pytest.raises(InputError, match=f"cannot find the torch of .*, which fails with {said}: "):
            target_of((str(other), "train.py"))


def test_other_commands_are_taken_for_this_python() -> None:
    assert target_of(("bash", "run.sh")) == target_of(()) == target_of((sys.executable, "x.py"))


@pytest.mark.parametrize("places", ["{0}:3:1", "{0},{1}"])
def test_libgomp_understands_our_places(places: str) -> None:
    """The real runtime prints the number of places that it reads."""
    library = find_runtime(target_of(()), {}, ()).origin.split(",")[0]
    if "gomp" not in library:
        pytest.skip(reason="needs a torch with libgomp")
    code = f"import ctypes; print(ctypes.CDLL({library!r}).omp_get_num_places())"
    env = {**os.environ, "OMP_PLACES": places}
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, check=True)
    assert int(printed.stdout) == min(3 if ":3:" in places else 2, len(os.sched_getaffinity(0)))
