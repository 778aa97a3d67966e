"""oneCCL's transport: what decides it, measured and kept figures, and that all ranks of a job use the same one."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch.distributed as dist

from cputrain import measurements
from cputrain.affinity.errors import InputError, RunError
from cputrain.affinity.planner.openmp import Runtime
from cputrain.affinity.planner.plan import plan_machine
from cputrain.affinity.planner.request import Request
from cputrain.affinity.rank import Rank, with_rank
from cputrain.affinity.topology.machine import narrow_machine
from cputrain.affinity.topology.sysfs import this_machine
from cputrain.comm.ccl import check
from cputrain.comm.ccl.environment import Transport, agree_on_transport, choose_transport, worker_threads
from cputrain.comm.store import SignedKeys
from cputrain.launch.command import is_due
from cputrain.measurements import cached_seconds, save_measurement, transport_records
from cputrain.mpi.hostfile import HostGroup
from cputrain.mpi.launchers import INTEL_MPI, OPEN_MPI
from cputrain.mpi.supervise.run import free_port
from tests.support.ccl_jobs import command, lines_of, needs_ccl, unmeasured_cache
from tests.support.commands import cputrain, here, mpi_path
from tests.support.forked import ended, forking_python
from tests.support.jobs import job_of

RANK = Rank(rank=1, world_size=4, local_rank=1, local_world_size=4, convention="env")
HYDRA = {"PMI_RANK": "1", "PMI_SIZE": "4", "PMI_FD": "11"}
FASTER_MPI = {"mpi": 0.0108, "ofi": 0.0389}
FASTER_LIBFABRIC = {"mpi": 0.0389, "ofi": 0.0108}


@pytest.mark.parametrize(
    ("env", "transport"),
    [
        (HYDRA, "mpi"),
        ({}, "ofi"),
        ({**HYDRA, "PMI_SIZE": "1"}, "ofi"),  # PMI's variables of something around this job
        ({**HYDRA, "OMPI_UNIVERSE_SIZE": "4"}, "ofi"),
        (with_rank(RANK, {}), "ofi"),  # the names that scripts read, given to ranks that no MPI has started
        ({**HYDRA, "CCL_ATL_TRANSPORT": "ofi"}, "ofi"),
    ],
)
def test_the_transport_follows_the_launcher_where_nothing_was_measured(env: dict[str, str], transport: str) -> None:
    assert choose_transport(env, RANK, dict).name == transport


@pytest.mark.parametrize("env", [with_rank(RANK, {}), {**HYDRA, "OMPI_UNIVERSE_SIZE": "4"}])
def test_mpi_is_refused_where_it_cannot_connect_the_ranks(env: dict[str, str]) -> None:
    with pytest.raises(InputError, match=r"CCL_ATL_TRANSPORT=mpi, but this rank was started by .*: start it with"):
        choose_transport({**env, "CCL_ATL_TRANSPORT": "mpi"}, RANK, dict)


def test_the_faster_one_is_taken_where_both_can_be_used_and_were_measured() -> None:
    measured = choose_transport(HYDRA, RANK, lambda: FASTER_MPI)
    assert str(measured) == "MPI (measured: 25 MiB all-reduce 10.8 ms over MPI, 38.9 ms over libfabric)"
    assert choose_transport(HYDRA, RANK, lambda: FASTER_LIBFABRIC).name == "ofi"
    assert choose_transport({}, RANK, lambda: FASTER_MPI).name == "ofi"
    assert choose_transport({**HYDRA, "CCL_ATL_TRANSPORT": "mpi"}, RANK, lambda: FASTER_LIBFABRIC).name == "mpi"
    half = choose_transport(HYDRA, RANK, lambda: {"ofi": 0.01})
    assert half.name == "mpi" and "`cputrain doctor ccl` measures" in half.why
    several = choose_transport(HYDRA, replace(RANK, local_world_size=2), lambda: FASTER_LIBFABRIC)
    assert several.name == "mpi" and "several hosts" in several.why
    # MPI starts with all ranks of the job, and a group of some of them is made without the others.
    assert choose_transport(HYDRA, RANK, lambda: FASTER_MPI, whole=False).name == "ofi"


def keep_seconds(env: dict[str, str], seconds: dict[str, float]) -> None:
    """Keep figures as a measurement does."""
    for record in transport_records({name: (s, 0.9 * s, 1.1 * s) for name, s in seconds.items()}, command="a test"):
        save_measurement(record, env)


def test_figures_are_kept_for_the_host_whatever_cores_a_rank_may_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    env = {"CPUTRAIN_CACHE": str(tmp_path)}
    assert cached_seconds(env) == {}
    keep_seconds(env, FASTER_LIBFABRIC)
    whole = this_machine()
    part = replace(narrow_machine(whole, frozenset(whole.pus[:1]), None), cpu_quota=0.5, memory_limit_bytes=1 << 30)
    monkeypatch.setattr(measurements, "this_machine", lambda: part)
    assert cached_seconds(env) == pytest.approx(FASTER_LIBFABRIC)


def agreed(own: list[Transport], is_set: list[bool], threads: tuple[int, ...] = (1, 1, 1)) -> list[str]:
    """What each of three ranks uses, or its error."""
    keys = SignedKeys(dist.HashStore(), "token")

    def one(number: int) -> str:
        rank = replace(RANK, rank=number, world_size=3, local_world_size=3)
        try:
            return agree_on_transport(
                rank, keys, lambda: own[number], is_set=is_set[number], threads=threads[number]
            ).name
        except InputError as error:
            return str(error)

    with ThreadPoolExecutor(3) as pool:
        return list(pool.map(one, range(3)))


def test_all_ranks_use_what_rank_0_has_chosen_or_say_that_they_cannot() -> None:
    over_mpi, over_libfabric = Transport(name="mpi", why="measured"), Transport(name="ofi", why="it is set")
    assert agreed([over_mpi, over_libfabric, over_mpi], [False] * 3) == ["mpi"] * 3
    first, refusal, third = agreed([over_mpi, over_libfabric, over_mpi], [False, True, False])
    assert (first, third) == ("mpi", "mpi")
    assert refusal.startswith("rank 1 uses libfabric (it is set), rank 0 MPI (measured): set CCL_ATL_TRANSPORT")
    first, second, refusal = agreed([over_mpi] * 3, [False] * 3, threads=(2, 2, 1))
    assert (first, second) == ("mpi", "mpi")
    assert refusal.startswith("rank 2 has 1 oneCCL thread (CCL_WORKER_COUNT), rank 0 2: set --comm-cores")


@pytest.mark.parametrize(
    ("env", "threads"),
    [
        ({}, 1),
        ({"CCL_WORKER_COUNT": "4"}, 1),  # settings() turns threads without comm cores off
        ({"CCL_WORKER_COUNT": "4", "CCL_WORKER_AFFINITY": "auto"}, 4),
        ({"CCL_WORKER_COUNT": "2", "CCL_WORKER_OFFLOAD": "1"}, 2),
    ],
)
def test_oneccl_s_threads_are_counted(env: dict[str, str], threads: int) -> None:
    assert worker_threads(env) == threads


def test_two_ranks_are_measured_over_both_and_the_figures_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both pairs of ranks are forked; those of a launch, below, are started as a user's."""
    mpi_path("intelmpi")
    monkeypatch.setattr(check, "PROGRAM", (*forking_python(), "-m", "cputrain.comm.ccl.check", check.RANK))
    cache = unmeasured_cache(tmp_path / "cache")
    printed = here("doctor", "ccl", **cache)
    assert printed.returncode == 0, printed.stderr
    assert "oneCCL 2021.13" in printed.stdout
    for title in ("MPI", "libfabric"):
        assert f"25,600 KiB over 2 ranks and {title}" in printed.stdout, printed.stdout
    seconds = cached_seconds(cache)
    assert set(seconds) == {"mpi", "ofi"} and all(1e-4 < each < 10 for each in seconds.values())


@needs_ccl
@pytest.mark.parametrize(
    "seconds",
    [pytest.param(FASTER_MPI, marks=[pytest.mark.long, pytest.mark.nightly]), FASTER_LIBFABRIC],  # MPI is the default
)
def test_ranks_under_mpirun_take_what_was_measured_to_be_faster(seconds: dict[str, float], tmp_path: Path) -> None:
    cache = unmeasured_cache(tmp_path / "cache")
    keep_seconds(cache, seconds)
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    argv = ("mpirun", "-np", "2", *forking_python(), "-m", "tests.support.ccl_rank", "meet")
    with command(*argv, **mpi_path("intelmpi"), **meeting, **cache) as process:
        end = ended(process, 120)
    assert end.status == 0, end.err
    faster = min(seconds, key=lambda name: seconds[name])
    assert [(line["sum"], line["transport"]) for line in lines_of(end.out)] == [(2.0, faster)] * 2


def test_a_launch_measures_only_where_both_transports_may_be_used_and_nothing_decides(tmp_path: Path) -> None:
    env = {"CPUTRAIN_CACHE": str(tmp_path)}
    plan = plan_machine(this_machine(), Request(ppn=1), Runtime())
    here = job_of(tmp_path, ("/usr/bin/python3", "train.py"), plan)
    assert not is_due(here, INTEL_MPI, env)  # the backend was never compiled, so perhaps nothing uses it
    (tmp_path / "ccl-torch2.13").mkdir()
    (tmp_path / "ccl-torch2.13/cputrain_ccl.so").touch()
    assert is_due(here, INTEL_MPI, env)
    assert not is_due(here, OPEN_MPI, env)
    assert not is_due(here, INTEL_MPI, {**env, "CCL_ATL_TRANSPORT": "mpi"})
    assert not is_due(replace(here, command=("./solver",)), INTEL_MPI, env)
    elsewhere = replace(here, groups=(HostGroup(hosts=("n1", "n2"), plan=plan),))
    assert not is_due(elsewhere, INTEL_MPI, env)
    keep_seconds(env, FASTER_MPI)
    assert not is_due(here, INTEL_MPI, env)


@pytest.mark.long
def test_a_launch_measures_before_the_first_job_that_can_choose(tmp_path: Path) -> None:
    cache = unmeasured_cache(tmp_path / "cache")
    intel = mpi_path("intelmpi")
    launch = ("launch", "--launcher", "intelmpi", "--ppn", "1", "--output", str(tmp_path / "run"), "--")
    code = "import os; print('transport', os.environ.get('CCL_ATL_TRANSPORT'))"
    first = cputrain(*launch, "python", "-c", code, **intel, **cache)
    assert first.returncode == 0 and "transport None" in first.stdout, first.stderr
    assert "measured: 25 MiB all-reduce" in first.stderr and set(cached_seconds(cache)) == {"mpi", "ofi"}


def test_the_check_tells_wrong_input_from_a_failure(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for error, status in ((InputError("no library"), 2), (RunError("no room"), 1)):

        def fails(_env: object, error: Exception = error) -> None:
            raise error

        monkeypatch.setattr(check, "find_libraries", fails)
        assert check.main() == status and capsys.readouterr().out == f"{error}\n"
