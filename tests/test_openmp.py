from pathlib import Path

from affinity.openmp import Runtime, environment, find_runtime, reconciled


def test_one_thread_alone_needs_no_binder() -> None:
    env = dict(environment((3,), Runtime(), packed=True, pin=False))
    assert env == {"OMP_NUM_THREADS": "1", "MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(1 << 40)}


def test_libgomp_places_each_thread() -> None:
    env = dict(environment((2, 3), Runtime(), packed=False, pin=True))
    assert env["OMP_PLACES"] == "{2},{3}"
    assert env["OMP_PROC_BIND"] == "close"
    assert not any(name.startswith("KMP") for name in env)


def test_libiomp5_has_one_binder() -> None:
    runtime = Runtime(openmp="libiomp5", allocator="tcmalloc", preload=("/a/libiomp5.so", "/b/libtcmalloc.so.4"))
    env = dict(environment((0, 1), runtime, packed=True, pin=True))
    assert env["KMP_AFFINITY"] == "granularity=fine,compact,1,0"
    assert env["LD_PRELOAD"] == "/a/libiomp5.so:/b/libtcmalloc.so.4"
    assert not {"OMP_PLACES", "OMP_PROC_BIND"} & env.keys()
    beside = dict(environment((2, 3), runtime, packed=False, pin=True))
    assert beside["KMP_AFFINITY"] == "granularity=fine,proclist=[2,3],explicit"


def test_libraries_are_found_in_order(tmp_path: Path) -> None:
    assert find_runtime((tmp_path,)) == Runtime()
    (tmp_path / "libjemalloc.so.2").touch()
    assert find_runtime((tmp_path,)).allocator == "jemalloc"
    (tmp_path / "libtcmalloc_minimal.so.4").touch()
    (tmp_path / "libiomp5.so").touch()
    found = find_runtime((tmp_path,))
    assert found == Runtime(
        openmp="libiomp5",
        allocator="tcmalloc",
        preload=(str(tmp_path / "libiomp5.so"), str(tmp_path / "libtcmalloc_minimal.so.4")),
    )


INHERITED = {"PATH": "/bin", "OMP_NUM_THREADS": "1", "GOMP_CPU_AFFINITY": "0-3", "LD_PRELOAD": "theirs.so"}
PLANNED = {"OMP_NUM_THREADS": "4", "OMP_PLACES": "{0},{1},{2},{3}", "LD_PRELOAD": "ours.so"}


def test_the_plan_wins_and_one_binder_is_left() -> None:
    env, clashes = reconciled(INHERITED, PLANNED, keep=False)
    assert env == {"PATH": "/bin", **PLANNED, "LD_PRELOAD": "ours.so:theirs.so"}
    assert clashes == ["OMP_NUM_THREADS=1 (planned: 4)", "GOMP_CPU_AFFINITY=0-3 (planned: unset)"]


def test_what_is_kept_is_reported_all_the_same() -> None:
    env, clashes = reconciled(INHERITED, PLANNED, keep=True)
    assert (env["OMP_NUM_THREADS"], env["GOMP_CPU_AFFINITY"]) == ("1", "0-3")
    assert env["OMP_PLACES"] == PLANNED["OMP_PLACES"]
    assert len(clashes) == 2


def test_agreement_is_no_clash() -> None:
    assert reconciled(PLANNED, {k: v for k, v in PLANNED.items() if k != "LD_PRELOAD"}, keep=False)[1] == []


def test_unpinned_threads_have_no_binder() -> None:
    for runtime in (Runtime(), Runtime(openmp="libiomp5")):
        env = dict(environment((2, 3), runtime, packed=False, pin=False))
        assert env["OMP_NUM_THREADS"] == "2"
        assert not {"OMP_PLACES", "OMP_PROC_BIND", "KMP_AFFINITY"} & env.keys()
