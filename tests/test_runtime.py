"""Which OpenMP runtime and allocator a Python loads: laid out here, and those of this very Python."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from affinity.errors import InputError
from affinity.runtime import Runtime, Target, find_runtime, target_of


def test_libraries_are_found_in_order(tmp_path: Path) -> None:
    target = Target(prefix=tmp_path, torch_lib=None)
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
    target = Target(prefix=tmp_path, torch_lib=torch_lib)
    assert find_runtime(target, {}, ()).origin == "the system's"
    (torch_lib / "libgomp.so.1").touch()
    assert find_runtime(target, {}, ()) == Runtime(origin=f"{torch_lib}/libgomp.so.1, which torch loads")
    (torch_lib / "libiomp5.so").touch()
    found = find_runtime(target, {}, ())
    assert (found.openmp, found.preload) == ("libiomp5", ())


def test_what_the_user_preloads_counts(tmp_path: Path) -> None:
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib/libjemalloc.so.2").touch()
    env = {"LD_PRELOAD": "/opt/libiomp5.so /opt/libtcmalloc.so.4.5"}
    found = find_runtime(Target(prefix=tmp_path, torch_lib=None), env, ())
    assert (found.openmp, found.allocator, found.preload) == ("libiomp5", "tcmalloc", ())


def test_the_found_runtime_is_the_one_that_this_torch_loads() -> None:
    """Load torch in a process of its own and look at what the kernel has mapped."""
    found = find_runtime(target_of(()), {}, ())
    code = "import torch; print(open('/proc/self/maps').read())"
    maps = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    loaded = {Path(line.split()[-1]) for line in maps.splitlines() if "omp" in line.rpartition("/")[2]}
    path = Path(found.origin.split(",")[0])
    assert path in loaded, (found, loaded)
    assert found.openmp == ("libiomp5" if any("iomp" in p.name for p in loaded) else "libgomp")


def test_another_python_is_asked(tmp_path: Path) -> None:
    other = tmp_path / "python3"
    other.write_text("#!/bin/sh\necho /opt/env\necho /opt/env/lib/python3/site-packages/torch/__init__.py\n")
    other.chmod(0o755)
    target = target_of((str(other), "train.py"))
    assert target == Target(prefix=Path("/opt/env"), torch_lib=Path("/opt/env/lib/python3/site-packages/torch/lib"))
    other.write_text("#!/bin/sh\nexit 3\n")
    with pytest.raises(InputError, match="does not say which torch"):
        target_of((str(other), "train.py"))


def test_other_commands_are_taken_for_this_python() -> None:
    assert target_of(("bash", "run.sh")) == target_of(()) == target_of((sys.executable, "x.py"))


@pytest.mark.parametrize("places", ["{0}:3:1", "{0},{1}"])
def test_libgomp_understands_our_places(places: str) -> None:
    """The real runtime tells how many places it made of our words."""
    library = find_runtime(target_of(()), {}, ()).origin.split(",")[0]
    if "gomp" not in library:
        pytest.skip(reason="needs a torch with libgomp")
    code = f"import ctypes; print(ctypes.CDLL({library!r}).omp_get_num_places())"
    env = {**os.environ, "OMP_PLACES": places}
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, check=True)
    assert int(said.stdout) == min(3 if ":3:" in places else 2, len(os.sched_getaffinity(0)))
