import pytest

from cputrain.affinity.planner.openmp import Runtime, omp_places, reconciled_environment, worker_environment


def test_one_thread_alone_needs_no_binder() -> None:
    env = dict(worker_environment((3,), Runtime(), packed=True, pin=False))
    assert env == {"OMP_NUM_THREADS": "1", "MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(1 << 40)}


def test_libgomp_places_each_thread() -> None:
    env = dict(worker_environment((2, 3), Runtime(), packed=False, pin=True))
    assert env["OMP_PLACES"] == "{2},{3}"
    assert env["OMP_PROC_BIND"] == "close"
    assert not any(name.startswith("KMP") for name in env)


def test_libiomp5_has_one_binder() -> None:
    runtime = Runtime(openmp="libiomp5", allocator="tcmalloc", preload=("/a/libiomp5.so", "/b/libtcmalloc.so.4"))
    env = dict(worker_environment((0, 1), runtime, packed=True, pin=True))
    assert env["KMP_AFFINITY"] == "granularity=fine,compact,1,0"
    assert env["LD_PRELOAD"] == "/a/libiomp5.so:/b/libtcmalloc.so.4"
    assert not {"OMP_PLACES", "OMP_PROC_BIND"} & env.keys()
    beside = dict(worker_environment((2, 3), runtime, packed=False, pin=True))
    assert beside["KMP_AFFINITY"] == "granularity=fine,proclist=[2,3],explicit"


@pytest.mark.parametrize(
    ("pus", "value"), [((3,), "{3}"), ((0, 2), "{0},{2}"), ((4, 5, 6), "{4}:3:1"), ((0, 2, 4, 6), "{0}:4:2")]
)
def test_places_in_few_words(pus: tuple[int, ...], value: str) -> None:
    assert omp_places(pus) == value


@pytest.mark.parametrize("pin", ["1", "yes"])
def test_intel_mpi_s_pinning_is_switched_off_in_the_rank(pin: str) -> None:
    inherited = {"I_MPI_PIN": pin, "I_MPI_PIN_DOMAIN": "socket"}
    env, clashes = reconciled_environment(inherited, {}, keep=False)
    assert env == {"I_MPI_PIN": "0"}
    assert clashes == [f"I_MPI_PIN={pin} (planned: 0)", "I_MPI_PIN_DOMAIN=socket (planned: unset)"]
    assert reconciled_environment({"I_MPI_PIN": "off"}, {}, keep=False) == ({"I_MPI_PIN": "off"}, [])


INHERITED = {"PATH": "/bin", "OMP_NUM_THREADS": "1", "GOMP_CPU_AFFINITY": "0-3", "LD_PRELOAD": "theirs.so"}
PLANNED = {"OMP_NUM_THREADS": "4", "OMP_PLACES": "{0},{1},{2},{3}", "LD_PRELOAD": "ours.so"}


def test_the_plan_wins_and_one_binder_is_left() -> None:
    env, clashes = reconciled_environment(INHERITED, PLANNED, keep=False)
    assert env == {"PATH": "/bin", **PLANNED, "LD_PRELOAD": "ours.so:theirs.so"}
    assert clashes == ["OMP_NUM_THREADS=1 (planned: 4)", "GOMP_CPU_AFFINITY=0-3 (planned: unset)"]


def test_kept_variables_are_reported_too() -> None:
    env, clashes = reconciled_environment(INHERITED, PLANNED, keep=True)
    assert (env["OMP_NUM_THREADS"], env["GOMP_CPU_AFFINITY"]) == ("1", "0-3")
    assert env["OMP_PLACES"] == PLANNED["OMP_PLACES"]
    assert len(clashes) == 2


def test_agreement_is_no_clash() -> None:
    assert reconciled_environment(PLANNED, {k: v for k, v in PLANNED.items() if k != "LD_PRELOAD"}, keep=False)[1] == []


def test_unpinned_threads_have_no_binder() -> None:
    for runtime in (Runtime(), Runtime(openmp="libiomp5")):
        env = dict(worker_environment((2, 3), runtime, packed=False, pin=False))
        assert env["OMP_NUM_THREADS"] == "2"
        assert not {"OMP_PLACES", "OMP_PROC_BIND", "KMP_AFFINITY"} & env.keys()
