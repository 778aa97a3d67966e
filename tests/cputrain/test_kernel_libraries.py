"""Kernels in a wheel: compiled for sets of instructions, used where they fit this CPU and the code."""

import hashlib
import os
from dataclasses import replace
from pathlib import Path

import pytest

from cputrain.kernels import batchnorm, build
from cputrain.kernels.build import INSTRUCTION_SETS, KernelLibrary
from cputrain.native_build import NativeExtension

FLAGS = {each.name: " ".join(("flags : fpu", *sorted(each.flags))) for each in INSTRUCTION_SETS}


def library(folder: Path, source: str = "int one() { return 1; }") -> KernelLibrary:
    (folder / "one.cpp").write_text(source)
    extension = NativeExtension(
        title="one",
        requested_by="a test",
        alternative="none",
        argv=lambda cxx, output: (cxx, build.NATIVE, "-shared", str(folder / "one.cpp"), "-o", str(output)),
    )
    return KernelLibrary(name="one", sources=(folder / "one.cpp",), extension=extension)


@pytest.fixture
def wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in which a file stands for each compiled library."""
    monkeypatch.setattr(build, "COMPILED", tmp_path / "compiled")
    for instructions in INSTRUCTION_SETS:
        path = library(tmp_path).compiled_path(instructions)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(instructions.name)
        path.with_suffix(".sha256").write_text(hashlib.sha256(instructions.name.encode()).hexdigest())
    return tmp_path


@pytest.mark.parametrize(
    ("flags", "used"),
    [
        *((text, name) for name, text in FLAGS.items()),
        (FLAGS["avx2"].replace("fma", "fma4"), None),
        (FLAGS["avx512"].replace("avx512vl", ""), "avx2"),
        ("Features : fp asimd", None),
        ("", None),
    ],
)
def test_a_wheel_has_the_library_for_this_cpu(
    flags: str, used: str | None, wheel: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "cpu_flags", lambda: flags)
    path = library(wheel).path({"CPUTRAIN_CACHE": str(wheel / "cache")})
    assert path.stem == used if used else path.is_relative_to(wheel / "cache")


def test_other_code_options_or_versions_and_damaged_files_are_compiled(
    wheel: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "cpu_flags", lambda: FLAGS["avx2"])
    env = {"CPUTRAIN_CACHE": str(wheel / "cache")}
    same = library(wheel)
    own = same.path(env)
    assert own.is_relative_to(wheel / "compiled")
    argv = same.extension.argv
    other = replace(same.extension, argv=lambda cxx, output: (*argv(cxx, output), "-O0"))
    for changed in (replace(same, depends_on=("torch 9",)), replace(same, extension=other)):
        assert changed.path(env).is_relative_to(wheel / "cache")
    elsewhere = wheel / "elsewhere"
    elsewhere.mkdir()
    assert library(elsewhere).path(env) == own, "where the sources are does not matter"
    assert library(wheel, "int two() { return 2; }").path(env).is_relative_to(wheel / "cache")
    library(wheel)
    own.write_text("damaged")
    assert same.path(env).is_relative_to(wheel / "cache")


@pytest.mark.long
@pytest.mark.parametrize("flags", [FLAGS["avx2"], pytest.param("this CPU's", marks=pytest.mark.nightly)])
def test_compiled_kernels_are_right_without_a_compiler(
    flags: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "COMPILED", tmp_path / "compiled")
    if flags == FLAGS["avx2"]:
        monkeypatch.setattr(build, "cpu_flags", lambda: flags)
    for instructions in INSTRUCTION_SETS:
        if flags in (FLAGS[instructions.name], "this CPU's"):
            batchnorm.LIBRARY.compile_for(instructions, os.environ)
    kernels = batchnorm.load({"PATH": "/nowhere", "CPUTRAIN_CACHE": str(tmp_path / "cache")})
    assert kernels.path.is_relative_to(tmp_path / "compiled") and not (tmp_path / "cache").exists()


def test_threads_are_shared_by_the_runtime_that_torch_has_loaded() -> None:
    """at::parallel_for is one thread in code that is compiled without -fopenmp, as the kernels are."""
    sources = [path for path in build.KERNELS.iterdir() if path.suffix in (".cpp", ".hpp")]
    assert len(sources) > 20 and not [path.name for path in sources if "parallel_for" in path.read_text()]
