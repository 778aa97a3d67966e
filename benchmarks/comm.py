"""All-reduces and training steps of two ranks on this host, one PU each: the ccl backend and its peers in one run.

    python -m benchmarks.comm [--rounds 3] [--crop 64]

Peers: oneCCL without Python (benchmarks/bare_ccl.cpp), gloo, Intel MPI's benchmark (IMB-MPI1), and a single copy of the
same bytes. Rounds are interleaved; figures are medians of the rounds' medians. Needs two cores and the ccl extra.
"""

import argparse
import json
import math
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch

from cputrain.affinity.rank import Rank
from cputrain.affinity.topology.sysfs import this_machine
from cputrain.affinity.views import processor_text
from cputrain.comm.ccl.environment import Transport, ccl_settings, find_libraries
from cputrain.mpi.supervise.run import free_port
from cputrain.native_build import compiler

HERE = Path(__file__).parent
SIZES = (1 << 10, 1 << 14, 1 << 18, 1 << 20, 1 << 22, 25 << 20, 100 << 20, 256 << 20)
REPEATS = 25
LIBRARIES = find_libraries(os.environ)
PREFIX = LIBRARIES.mpi.parent.parent
PUS = [core.pus[0] for core in this_machine().allowed_cores[:2]]
Times = dict[int, float]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--crop", type=int, default=64)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        bare = compile_bare(Path(scratch))
        show_allreduce(options.rounds, bare, Path(scratch))
    show_steps(options.rounds, options.batch, options.crop)


def show_allreduce(rounds: int, bare: Path, scratch: Path) -> None:
    """Print the table of all-reduces."""
    python = (sys.executable, "-m", "benchmarks.comm_rank")
    sizes = tuple(map(str, SIZES))
    numbers = iter(range(1000))

    def bare_over(transport: str) -> Callable[[], Times]:
        def run() -> Times:
            file = scratch / f"address{next(numbers)}"
            commands = [(str(bare), str(rank), "2", str(file), str(REPEATS), *sizes) for rank in (0, 1)]
            return times_of(both(commands, transport))

        return run

    def ours(backend: str, transport: str) -> Callable[[], Times]:
        return lambda: times_of(both([(*python, backend, "allreduce", str(REPEATS), *sizes)] * 2, transport))

    contenders: dict[str, Callable[[], Times]] = {
        "copy": copy_times,
        "IMB": imb,
        "bare, mpi": bare_over("mpi"),
        "ccl, mpi": ours("ccl", "mpi"),
        "bare, ofi": bare_over("ofi"),
        "ccl, ofi": ours("ccl", "ofi"),
        "gloo": ours("gloo", "ofi"),
    }
    measured: dict[str, list[Times]] = {name: [] for name in contenders}
    for number in range(rounds):
        for name, run in contenders.items():
            print(f"round {number + 1}/{rounds}  {name}", file=sys.stderr)
            measured[name].append(run())
    print(f"{processor_text(this_machine())}\n")
    names = " | ".join(f"{name}, us" for name in contenders)
    print(f"| bytes | {names} | ccl/bare, mpi | ccl/bare, ofi | gloo/ccl, mpi |")
    print("|---" * (len(contenders) + 4) + "|")
    for size in SIZES:
        us = {name: 1e6 * median(times.get(size, math.nan) for times in rows) for name, rows in measured.items()}
        ratios = (us["ccl, mpi"] / us["bare, mpi"], us["ccl, ofi"] / us["bare, ofi"], us["gloo"] / us["ccl, mpi"])
        cells = [f"{value:,.0f}" for value in us.values()] + [f"{ratio:.2f}" for ratio in ratios]
        print(f"| {size:,} | " + " | ".join(cells) + " |")


def show_steps(rounds: int, batch: int, crop: int) -> None:
    """Print the table of ResNet-50 steps; exposed: extra time of a step compared to one without communication."""
    contenders = {"gloo": ("gloo", "ofi"), "ccl, mpi": ("ccl", "mpi"), "ccl, ofi": ("ccl", "ofi")}
    steps: dict[str, list[dict[str, float]]] = {name: [] for name in contenders}
    for number in range(rounds):
        for name, (backend, transport) in contenders.items():
            print(f"round {number + 1}/{rounds}  steps, {name}", file=sys.stderr)
            command = (
                sys.executable,
                "-m",
                "benchmarks.comm_rank",
                backend,
                "ddp",
                "5",
                "resnet50",
                str(batch),
                str(crop),
            )
            steps[name] += both([command] * 2, transport)
    print(f"\n| ResNet-50, {batch} x {crop} x {crop} a rank | step, s | without communication, s | exposed |")
    print("|---|---|---|---|")
    for name, rows in steps.items():
        step, alone = (median(row[key] for row in rows) for key in ("step", "no_sync"))
        print(f"| {name} | {step:.3f} | {alone:.3f} | {100 * (step - alone) / step:.1f} % |")


def environment(transport: str, rank: int) -> dict[str, str]:
    """Return the environment of one of two ranks for a transport."""
    place = Rank(rank=rank, world_size=2, local_rank=rank, local_world_size=2, convention="env")
    variables = {
        name: value for name, value, _ in ccl_settings(LIBRARIES, place, Transport(name=transport, why="compared"), {})
    }
    return {**variables, "OMP_NUM_THREADS": "1", "LD_LIBRARY_PATH": f"{LIBRARIES.ccl.parent}:{PREFIX}/lib"}


def both(commands: list[tuple[str, ...]], transport: str) -> list[dict[str, float]]:
    """Run a command as two ranks, each bound to a PU; return the JSON lines of their output."""
    env = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    if transport == "mpi":
        argv = [str(PREFIX / "bin/mpiexec.hydra"), "-genv", "I_MPI_PIN", "0"]
        for rank, command in enumerate(commands):
            more = [word for name, value in environment("mpi", rank).items() for word in ("-env", name, value)]
            argv += [*([":"] if rank else []), "-n", "1", *more, "taskset", "-c", str(PUS[rank]), *command]
        env |= {"I_MPI_ROOT": str(PREFIX), "LD_LIBRARY_PATH": f"{PREFIX}/lib", "PATH": f"{PREFIX}/bin:{env['PATH']}"}
        done = subprocess.run(argv, env=env, capture_output=True, encoding="utf-8", check=True, timeout=600)
        return lines(done.stdout)
    processes = []
    for rank, command in enumerate(commands):
        variables = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2}
        mine = {**env, **environment("ofi", rank), **{name: str(value) for name, value in variables.items()}}
        processes.append(
            subprocess.Popen(
                ["taskset", "-c", str(PUS[rank]), *command],
                env=mine,
                stdout=subprocess.PIPE,
                encoding="utf-8",
            )
        )
    outputs = [process.communicate(timeout=600)[0] for process in processes]
    if any(process.returncode for process in processes):
        raise RuntimeError(f"{commands[0]} failed")
    return [line for output in outputs for line in lines(output)]


def lines(output: str) -> list[dict[str, float]]:
    return [json.loads(line) for line in output.splitlines() if line.startswith("{")]


def times_of(said: list[dict[str, float]]) -> Times:
    return {int(row["bytes"]): row["seconds"] for row in said}


def imb() -> Times:
    """Run Intel MPI's all-reduce benchmark."""
    with tempfile.NamedTemporaryFile("w", encoding="utf-8", suffix=".txt") as file:
        file.write("\n".join(map(str, SIZES)) + "\n")
        file.flush()
        env = {**os.environ, "I_MPI_ROOT": str(PREFIX), "LD_LIBRARY_PATH": f"{PREFIX}/lib"}
        env |= {"FI_PROVIDER_PATH": str(LIBRARIES.fabric.parent), "PATH": f"{PREFIX}/bin:{env['PATH']}"}
        domain = ",".join(hex(1 << pu) for pu in PUS)
        argv = [str(PREFIX / "bin/mpiexec.hydra"), "-genv", "I_MPI_PIN_DOMAIN", f"[{domain}]", "-n", "2"]
        argv += [
            str(PREFIX / "bin/IMB-MPI1"),
            "Allreduce",
            "-npmin",
            "2",
            "-msglen",
            file.name,
            "-mem",
            "2",
            "-iter",
            str(REPEATS),
        ]
        said = subprocess.run(argv, env=env, capture_output=True, encoding="utf-8", check=True, timeout=300).stdout
    rows = re.findall(r"^\s+(\d+)\s+\d+\s+[\d.]+\s+[\d.]+\s+([\d.]+)", said, re.MULTILINE)
    return {int(size): float(us) / 1e6 for size, us in rows}


def copy_times() -> Times:
    """Time one copy of each size on one core."""
    code = (
        "import json, os, sys, time, torch\n"
        f"os.sched_setaffinity(0, [{PUS[0]}])\ntorch.set_num_threads(1)\n"
        "for size in map(int, sys.argv[1:]):\n"
        "    a, b, s = torch.ones(size // 4), torch.ones(size // 4), []\n"
        f"    for _ in range({REPEATS}):\n"
        "        t = time.perf_counter(); b.copy_(a); s.append(time.perf_counter() - t)\n"
        "    print(json.dumps({'bytes': size, 'seconds': sorted(s)[len(s) // 2]}))\n"
    )
    argv = [sys.executable, "-c", code, *map(str, SIZES)]
    return times_of(lines(subprocess.run(argv, capture_output=True, encoding="utf-8", check=True).stdout))


def compile_bare(folder: Path) -> Path:
    """Compile benchmarks/bare_ccl.cpp."""
    program = folder / "bare_ccl"
    argv = [compiler(os.environ) or "c++", "-std=c++17", "-O2", f"-I{LIBRARIES.include}", str(HERE / "bare_ccl.cpp")]
    argv += ["-o", str(program), f"-L{LIBRARIES.ccl.parent}", f"-l:{LIBRARIES.ccl.name}", "-Wl,--disable-new-dtags"]
    subprocess.run([*argv, f"-Wl,-rpath,{LIBRARIES.ccl.parent}", "-pthread"], check=True)
    return program


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
