"""The ccl backend with real oneCCL: results, launchers, losses, and PyTorch's own cases."""

import json
import os
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from cputrain.mpi.launch_command import find_launcher
from cputrain.mpi.supervise.run import free_port
from tests.support.ccl_jobs import command, lines_of, needs_ccl, started, unmeasured_cache
from tests.support.commands import PPN, mpi_path, needs_two_cores
from tests.support.forked import ROOT, Ended, ended, forked, forking_python, in_fork

pytestmark = needs_ccl


def together(*arguments: str, ranks: int = 2, limit_s: float = 200.0, **env: str) -> list[dict]:
    """What the ranks of tests.support.ccl_rank say, by rank; all must end well."""
    said = []
    with started("tests.support.ccl_rank", *arguments, ranks=ranks, **env) as processes:
        for process in processes:
            end = ended(process, limit_s)
            assert end.status == 0, end.err
            assert "CCL_WARN" not in end.out + end.err
            said += lines_of(end.out)
    return sorted(said, key=lambda line: line["rank"])


@pytest.mark.parametrize("ranks", [2, *(pytest.param(ranks, marks=pytest.mark.long) for ranks in (3, 5, 8))])
def test_every_collective_is_right_on_generated_shapes_types_and_layouts(ranks: int) -> None:
    count = {2: 100, 3: 60, 5: 30, 8: 15}[ranks]
    assert [line["examples"] >= count for line in together("examples", str(count), ranks=ranks)] == [True] * ranks


@pytest.mark.long
def test_sums_of_two_ranks_are_gloo_s_bit_for_bit_and_tensors_may_be_huge() -> None:
    assert [line["equal"] for line in together("gloo")] == [True, True]


@pytest.mark.long
@pytest.mark.nightly
def test_ten_thousand_collectives_leak_no_memory() -> None:
    for line in together("soak", "10000"):
        assert line["grown_mib"] < 20, line


@pytest.mark.long
def test_fsdp_checkpoints_and_hooks_use_it() -> None:
    assert [line["users"] for line in together("users", limit_s=120)] == ["ok", "ok"]


def test_a_lost_rank_ends_the_other_within_30_s_and_is_named() -> None:
    """Several jobs at once here and below, as they mostly wait."""
    with ExitStack() as stack:
        jobs = {
            (how, lost): stack.enter_context(started("tests.support.ccl_rank", "wrong", f"{how}{lost}"))
            for how in ("kill", "stop")
            for lost in (0, 1)
        }
        ends = {job: ended(processes[1 - job[1]], 90) for job, processes in jobs.items()}
    for (_, lost), end in ends.items():
        assert end.status == 1, end.err
        said = lines_of(end.out)[0]
        assert said["seconds"] < 30
        store_is_gone = lost == 0 and "the job's store" in said["error"]
        assert store_is_gone or (f"rank {lost} on" in said["error"] and "no heartbeat" in said["error"]), said
        assert f"rank {1 - lost} waits in ALLREDUCE #2 of group 0 (Float[10])" in said["error"]


def failing(*hows: str, ranks: int = 2, **env: str) -> list[list[str]]:
    """What each of the first ranks of a job says of its error, for several jobs at once."""
    with ExitStack() as stack:
        jobs = [stack.enter_context(started("tests.support.ccl_rank", "wrong", how, **env)) for how in hows]
        return [[error for process in job[:ranks] for error in errors_of(ended(process, 90))] for job in jobs]


def errors_of(end: Ended) -> list[str]:
    return [line.get("error", "") for line in lines_of(end.out)] or [end.err]


def test_a_rank_that_does_not_join_is_named_at_the_timeout() -> None:
    """Whether the other waits for the collective itself, for its future, as DDP does, for one before it that has more
    time, or for a group to be made."""
    hows = ("late", "late_future", "late_beside", "late_group")
    late, late_future, late_beside, late_group = (errors[0] for errors in failing(*hows, ranks=1))
    for error, number in ((late, 2), (late_future, 2), (late_beside, 3)):
        assert f"Timed out after 4 s in ALLREDUCE #{number} of group 0 (Float[10]); not joined by rank 1 on" in error
    assert "ccl: Timed out after 4 s while group 1 was created: not all of its ranks joined (missing: 1)" in late_group


@pytest.mark.long
def test_a_program_may_catch_a_timeout_and_go_on() -> None:
    """The watchdog ends ranks that are stuck, not those that go on."""
    with started("tests.support.ccl_rank", "recover") as processes:
        end = ended(processes[0], 60)
    assert end.status == 0 and "Timed out after 4 s" in lines_of(end.out)[0]["error"], end.err


def test_a_rank_may_end_while_collectives_are_in_flight() -> None:
    """oneCCL is not taken down under the thread that drives it: no crash, no hang, and the script's own status."""
    with ExitStack() as stack:
        jobs = [stack.enter_context(started("tests.support.ccl_rank", "leave")) for _ in range(3)]
        ends = [ended(process, 90) for job in jobs for process in job]
    assert [end.status for end in ends] == [3] * 6, [end.err for end in ends]


def test_debug_mode_names_what_ranks_disagree_on() -> None:
    """The rank that finds it first ends, and the other may see no more than that."""
    named = {"shape": "Tensor Tensor shapes", "type": "Tensor Tensor dtypes", "order": "Op type"}
    for errors, expected in zip(failing(*named, TORCH_DISTRIBUTED_DEBUG="DETAIL"), named.values(), strict=True):
        found = [error for error in errors if "Detected mismatch between collectives on ranks" in error]
        assert any(expected in error for error in found), errors


RANK = ("-m", "tests.support.ccl_rank", "meet")
TORCHRUN = ("-m", "torch.distributed.run", "--nproc-per-node=2", "--no-python")


def met(end: Ended) -> list[tuple[int, float, str]]:
    """Rank, sum and transport of the ranks that a launcher has started."""
    assert end.status == 0, end.err
    assert "MPI_Finalize" not in end.err
    return sorted((line["rank"], line["sum"], line["transport"]) for line in lines_of(end.out))


def under_mpirun(argv: tuple[str, ...], **env: str) -> list[tuple[int, float, str]]:
    with command(*argv, *RANK, MASTER_PORT=str(free_port()), **env) as job:
        return met(ended(job))


def under_torchrun(*python: str, **env: str) -> list[tuple[int, float, str]]:
    with forked(*TORCHRUN, *python, *RANK, MASTER_PORT=str(free_port()), **env) as job:
        return met(ended(job))


NIGHTLY = [pytest.mark.long, pytest.mark.nightly]


@pytest.mark.parametrize(
    ("name", "transport", "forks"),
    [
        pytest.param("intelmpi", "mpi", False, marks=pytest.mark.long),  # also below, from a folder with a space
        ("openmpi", "ofi", True),
        pytest.param("mpich", "mpi", False, marks=pytest.mark.long),
        *(pytest.param(name, "ofi", False, marks=NIGHTLY) for name in ("openmpi", "openmpi4")),
    ],
)
def test_it_starts_under_every_mpirun(name: str, transport: str, forks: bool, tmp_path: Path) -> None:
    cache = unmeasured_cache(tmp_path / "cache")
    path = {**os.environ, **mpi_path(name)}
    launcher = find_launcher(name.removesuffix("4"), path)
    root = ("--allow-run-as-root", "--oversubscribe") if "openmpi" in name else ()
    prefix = ("--prefix", launcher.prefix) if name == "openmpi" and launcher.prefix else ()
    argv = (launcher.program, *root, *prefix, "-np", "2", *(forking_python() if forks else (sys.executable,)))
    said = under_mpirun(argv, **mpi_path(name), **dict(launcher.variables), **cache)
    assert said == [(0, 2.0, transport), (1, 2.0, transport)]


@pytest.mark.parametrize(("launcher", "transport"), [("intelmpi", "mpi"), (None, "ofi")])
def test_its_libraries_may_be_below_a_folder_with_a_space(launcher: str | None, transport: str, tmp_path: Path) -> None:
    (tmp_path / "my code").symlink_to(sys.prefix)
    env = {"I_MPI_ROOT": str(tmp_path / "my code"), **unmeasured_cache(tmp_path / "cache")}
    if launcher is None:
        said = under_torchrun(*forking_python(), **env)
    else:
        env |= mpi_path(launcher)
        said = under_mpirun(
            (find_launcher(launcher, {**os.environ, **env}).program, "-np", "2", *forking_python()), **env
        )
    assert said == [(0, 2.0, transport), (1, 2.0, transport)]


@pytest.mark.long
@pytest.mark.nightly
def test_it_starts_under_torchrun() -> None:
    assert under_torchrun(sys.executable) == [(0, 2.0, "ofi"), (1, 2.0, "ofi")]


def test_it_starts_under_our_launcher(tmp_path: Path) -> None:
    assert under_our_launcher(tmp_path / "run", ppn=PPN)[0] == [(i, float(PPN), "ofi") for i in range(PPN)]


def under_our_launcher(run: Path, *options: str, ppn: int) -> tuple[list[tuple[int, float, str]], list[dict]]:
    """What ranks say that `cputrain launch` has started: as `met`, and all of it."""
    launch = ("launch", "--ppn", str(ppn), *options, "--output", str(run), "--", sys.executable)
    done = in_fork(*launch, *RANK, cwd=ROOT)
    return met(Ended(done.returncode, done.stdout, done.stderr)), lines_of(done.stdout)


@needs_two_cores
def test_oneccl_s_threads_run_on_the_planned_cores(tmp_path: Path) -> None:
    """One worker, its comm core the second one: oneCCL's thread is there, and so is ours."""
    _, (said,) = under_our_launcher(tmp_path / "run", "--comm-cores", "1", ppn=1)
    worker = json.loads((tmp_path / "run/plan.json").read_text())["workers"][0]
    assert len(worker["comm_pus"]) == 1
    assert any(pus == worker["comm_pus"] for _, pus in said["threads"]), said


@pytest.mark.long
@pytest.mark.parametrize(
    ("backend", "ranks", "passing"),
    [
        ("ccl", 2, 97),
        *(
            pytest.param(*case, marks=pytest.mark.nightly)
            for case in (("ccl", 4, 98), ("gloo", 2, 99), ("gloo", 4, 100))
        ),
    ],
)
def test_pytorch_s_own_cases_pass(tmp_path: Path, backend: str, ranks: int, passing: int) -> None:
    """All that run on CPUs, in one group. What is left out has its reason."""
    listing = subprocess.run(
        [sys.executable, "-c", LISTING],
        env={**os.environ, "BACKEND": "gloo", "WORLD_SIZE": str(ranks)},
        capture_output=True,
        text=True,
        check=True,
    )
    marked: dict[str, str] = json.loads(listing.stdout)
    skipped = {name for name in MARKED if marked[name]}
    assert skipped >= {*MARKED} - FOR_FOUR_RANKS and DIFFERENT["ccl"].keys() | DIFFERENT["gloo"].keys() <= marked.keys()
    left_out = skipped | DIFFERENT[backend].keys()
    chosen = [name for name in marked if name not in left_out | ALONE[backend]]
    rows = [
        row
        for names in (chosen, *([name] for name in ALONE[backend]))
        for row in cases(tmp_path, backend, ranks, names)
    ]
    assert len({row["case"] for row in rows if row["outcome"] == "pass"}) == passing


def cases(folder: Path, backend: str, ranks: int, names: list[str]) -> list[dict[str, str]]:
    """What became of these cases on each rank; none may fail."""
    results, shared = folder / f"results-{len(names)}", folder / f"shared-{len(names)}"
    shared.mkdir()
    env = {"BACKEND": backend, "TEMP_DIR": str(shared)}
    with started("tests.support.torch_cases", str(results), *names, ranks=ranks, **env) as processes:
        for process in processes:
            end = ended(process, 300)
            rows = [json.loads(line) for line in results.read_text().splitlines()]
            failed = [row for row in rows if row["outcome"] == "fail"]
            assert not failed and (end.status == 0 or len(names) == 1), f"{failed}\n{end.err}"
    return rows


LISTING = """
import json
from torch.testing._internal.distributed.distributed_test import DistributedTest
cases = DistributedTest._DistTestBase
names = sorted(name for name in dir(cases) if name.startswith("test_"))
print(json.dumps({name: getattr(getattr(cases, name), "__unittest_skip_why__", "") for name in names}))
"""
# PyTorch marks these as skipped for gloo, and they fail there; other cases with such a mark pass and are run. Their
# reasons are PyTorch's: for GPUs, for NCCL, for a group that is made by a file, and for torchvision beside these cases.
FOR_FOUR_RANKS = {"test_new_subgroups_with_group_param"}
MARKED = {
    "test_SyncBatchNorm_process_group",
    "test_all_to_all_cuda",
    "test_all_to_all_cuda_complex",
    "test_all_to_all_full_group_cuda",
    "test_barrier_timeout_global",
    "test_batch_isend_irecv_mixed_backend_err",
    "test_batch_isend_irecv_op_err",
    *FOR_FOUR_RANKS,
}
MONITORED = "torch.distributed.monitored_barrier refuses all but gloo: group.monitored_barrier is tested with strangers"
LISTS = "gloo has no all_to_all of lists"
DIFFERENT = {
    "ccl": {
        "test_barrier_timeout_full_group": "a collective that has timed out ends oneCCL for the process: tested above",
        "test_ddp_logging_data_cpu": "PyTorch logs every backend that is not its own as 'custom'",
        "test_monitored_barrier_gloo": MONITORED,
        "test_monitored_barrier_gloo_rank_0_timeout": "expects gloo's words",
        "test_monitored_barrier_gloo_subgroup": MONITORED,
    },
    "gloo": dict.fromkeys(("test_all_to_all", "test_all_to_all_complex", "test_all_to_all_full_group"), LISTS),
}
# After it, gloo's group cannot be used any more, and the case's own end is all that counts.
ALONE = {"ccl": set[str](), "gloo": {"test_monitored_barrier_gloo"}}
