from pathlib import Path

from affinity.openmp import Runtime, environment, find_runtime


def test_one_thread_alone_needs_no_binder() -> None:
    env = dict(environment((3,), Runtime(), alone=True))
    assert env == {"OMP_NUM_THREADS": "1", "MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(1 << 40)}


def test_libgomp_places_each_thread() -> None:
    env = dict(environment((2, 3), Runtime(), alone=False))
    assert env["OMP_PLACES"] == "{2},{3}"
    assert env["OMP_PROC_BIND"] == "close"
    assert not any(name.startswith("KMP") for name in env)


def test_libiomp5_has_one_binder() -> None:
    runtime = Runtime(openmp="libiomp5", allocator="tcmalloc", preload=("/a/libiomp5.so", "/b/libtcmalloc.so.4"))
    env = dict(environment((0, 1), runtime, alone=True))
    assert env["KMP_AFFINITY"] == "granularity=fine,compact,1,0"
    assert env["LD_PRELOAD"] == "/a/libiomp5.so:/b/libtcmalloc.so.4"
    assert not {"OMP_PLACES", "OMP_PROC_BIND"} & env.keys()
    beside = dict(environment((2, 3), runtime, alone=False))
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
