"""What tests share: machines and images made on the spot, the command line as a user meets it, and honest skips."""

import gzip
import os
import shutil
import struct
import subprocess
import sys
from collections.abc import Callable, Generator
from pathlib import Path

import hypothesis
import numpy as np
import pytest
from PIL import Image

from affinity.cpuset import format_list
from affinity.machine import Core, Machine, NumaNode, ordered
from tests.hangs import children_of, stacks_of

hypothesis.settings.register_profile("shared", deadline=None)  # a shared machine pauses now and then
hypothesis.settings.load_profile("shared")
HANGS_S = 300.0  # for a command that takes some seconds
GOLDEN = Path(__file__).parent / "golden"
collect_ignore = [] if os.environ.get("TENSORFLOW_PYTHON") else ["test_tensorflow.py"]  # see there


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="rewrite the golden files from what is computed now")


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    """Compare a text with tests/golden/NAME; a missing file fails."""

    def compare(name: str, text: str) -> None:
        path = GOLDEN / name
        if request.config.getoption("--update-golden"):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text + "\n")
        assert path.is_file(), f"no golden file {path}: run pytest --update-golden and read what it wrote"
        assert text + "\n" == path.read_text()

    return compare


def need(package: str, program: str) -> None:
    """Skip the test where a system package is absent."""
    if not shutil.which(program):
        pytest.skip(reason=f"needs the system package {package} ({program})")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    call: pytest.CallInfo[None],
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Where everything must run, a skip is a failure; a command that failed is shown with what it said."""
    report = yield
    if call.excinfo and isinstance(failed := call.excinfo.value, subprocess.CalledProcessError):
        report.sections.append(("stderr of the command", str(failed.stderr)))
    if report.skipped and os.environ.get("CPUTRAIN_REQUIRE_REAL") == "1":
        report.outcome = "failed"
        report.longrepr = f"skipped though CPUTRAIN_REQUIRE_REAL=1: {report.longrepr}"
    return report


def mpi_path(name: str) -> dict[str, str]:
    """PATH with a launcher first: those of `make mpi`, or the system's "openmpi4"; skips where it is absent."""
    if name == "openmpi4":
        program = shutil.which("mpirun.openmpi", path="/usr/bin")
        if program is None:
            pytest.skip(reason="needs the system package openmpi-bin (mpirun.openmpi)")
        return {"PATH": f"/usr/bin:{os.environ['PATH']}"}
    folder = Path(__file__).parents[1] / ".mpi" / name / "bin"
    if not (folder / "mpirun").exists():
        pytest.skip(reason=f"needs {name}: make mpi")
    return {"PATH": f"{folder}:{os.environ['PATH']}"}


def build_machine(
    packages: int, nodes: int, cores: int, smt: int, numbering: str = "block", memory_bytes: int = 64 << 30
) -> Machine:
    """packages x nodes x cores x smt PUs, numbered as Linux does on one vendor's hosts or another's.

    block: first threads of all cores, then second ones; adjacent: a core's threads side by side; interleaved: first
    threads in turn over the packages.
    """
    total = packages * nodes * cores
    made = []
    for i in range(total):
        package, place = divmod(i, nodes * cores)
        first = place * packages + package if numbering == "interleaved" else i
        pus = tuple(first * smt + t if numbering == "adjacent" else first + t * total for t in range(smt))
        made.append(Core(pus=pus, package=package, numa_node=i // cores))
    by_node = {n: tuple(sorted(p for c in made if c.numa_node == n for p in c.pus)) for n in range(packages * nodes)}
    return Machine(
        name="made",
        model="made machine",
        isa=("avx2",),
        cores=ordered(made),
        numa_nodes=tuple(NumaNode(id=n, pus=pus, memory_bytes=memory_bytes, near=(n,)) for n, pus in by_node.items()),
        allowed_pus=tuple(range(total * smt)),
        allowed_nodes=tuple(by_node),
    )


def write_sysfs(machine: Machine, root: Path, *, masks: bool = False, online_file: bool = True) -> None:
    """Write a machine as the kernel would show it under root; `masks` leaves out the list forms."""

    def put(path: str, text: str) -> None:
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text + "\n")

    def words(pus: tuple[int, ...]) -> str:
        digits = f"{sum(1 << p for p in pus):x}"
        digits = digits.rjust(-(-len(digits) // 8) * 8, "0")
        return ",".join(digits[i : i + 8] for i in range(0, len(digits), 8))

    cpu = "sys/devices/system/cpu"
    if online_file:
        put(f"{cpu}/online", format_list(machine.pus))
    for number, core in enumerate(machine.cores):
        for pu in core.pus:
            topology = f"{cpu}/cpu{pu}/topology"
            put(f"{topology}/physical_package_id", str(core.package))
            put(f"{topology}/core_id", str(number % 3))  # repeats on purpose: it must not be used
            if core.die is not None:
                put(f"{topology}/die_id", str(core.die))
            if any(other.speed < 1 for other in machine.cores):
                put(f"{cpu}/cpu{pu}/acpi_cppc/nominal_perf", str(round(20 * core.speed)))
                put(f"{cpu}/cpu{pu}/acpi_cppc/highest_perf", str(round(1000 * core.speed)))
            for level, lowest in ((2, core.l2), (3, core.l3)):
                sharing = tuple(p for c in machine.cores if (c.l2, c.l3)[level - 2] == lowest for p in c.pus)
                if lowest is not None:
                    index = f"{cpu}/cpu{pu}/cache/index{level}"
                    put(f"{index}/level", str(level))
                    put(f"{index}/shared_cpu_{'map' if masks else 'list'}", (words if masks else format_list)(sharing))
            if masks:
                put(f"{topology}/thread_siblings", words(core.pus))
            else:
                put(f"{topology}/thread_siblings_list", format_list(core.pus))
    for node in machine.numa_nodes:
        folder = f"sys/devices/system/node/node{node.id}"
        put(f"{folder}/cpumap" if masks else f"{folder}/cpulist", words(node.pus) if masks else format_list(node.pus))
        put(f"{folder}/meminfo", f"Node {node.id} MemTotal:       {node.memory_bytes // 1024} kB")
    put("proc/cpuinfo", f"processor\t: 0\nmodel name\t: {machine.model}\nflags\t\t: fpu {' '.join(machine.isa)} sse")
    put("proc/sys/kernel/hostname", machine.name)


def write_images(root: Path, *, classes: int = 3, train: int = 12, val: int = 5, size: int = 40) -> Path:
    """An image folder of JPEGs whose colour tells the class; `train` and `val` images of each class."""
    rng = np.random.default_rng(0)
    for split, count in (("train", train), ("val", val)):
        for label in range(classes):
            folder = root / split / f"class{label}"
            folder.mkdir(parents=True)
            for i in range(count):
                pixels = rng.integers(0, 120, (size, size + 8, 3), dtype=np.uint8)
                pixels[..., label % 3] += 100
                Image.fromarray(pixels).save(folder / f"{i:03d}.jpg", quality=90)
    return root


def write_mnist(folder: Path, *, train: int, val: int, zipped: bool) -> np.ndarray:
    """MNIST's files, of noise that is brighter the higher its digit; returns the pixels, those of train first."""
    folder.mkdir(exist_ok=True)
    labels = (np.arange(train + val) % 10).astype(np.uint8)
    noise = np.random.default_rng(0).integers(0, 120, (train + val, 28, 28), dtype=np.uint8)
    pixels = noise + 13 * labels[:, None, None]
    for name, part in (("train", slice(0, train)), ("t10k", slice(train, None))):
        for kind, values in (("images-idx3", pixels[part]), ("labels-idx1", labels[part])):
            data = struct.pack(">HBB", 0, 8, values.ndim) + struct.pack(f">{values.ndim}I", *values.shape)
            data += values.tobytes()
            path = folder / f"{name}-{kind}-ubyte{'.gz' if zipped else ''}"
            path.write_bytes(gzip.compress(data) if zipped else data)
    return pixels


def cputrain(*arguments: str, cwd: Path | None = None, **env: str) -> subprocess.CompletedProcess[str]:
    """Run the command as a user does, in a shell's bare environment. One that hangs fails with where it does."""
    argv = [sys.executable, "-m", "cputrain", *arguments]
    pipe = subprocess.PIPE
    with subprocess.Popen(argv, cwd=cwd, env={**os.environ, **env}, stdout=pipe, stderr=pipe, text=True) as process:
        try:
            out, err = process.communicate(timeout=HANGS_S)
        except subprocess.TimeoutExpired:
            where = "\n".join(stacks_of(pid) for pid in [process.pid, *children_of(process.pid)])
            process.terminate()
            out, err = process.communicate()
            pytest.fail(f"hangs: {argv}\n{where}\n{out}\n{err}")
    return subprocess.CompletedProcess(argv, process.returncode, out, err)


def refused(result: subprocess.CompletedProcess[str]) -> str:
    """The one line of a command that refused its input with status 2; fails on anything else."""
    assert result.returncode == 2, result.stderr + result.stdout
    lines = result.stderr.strip().splitlines()
    assert len(lines) == 1, result.stderr
    return lines[0]
