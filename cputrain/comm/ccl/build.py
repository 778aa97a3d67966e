"""The C++ part of the backend: compiled for this torch, Python and oneCCL."""

import hashlib
import os
import platform
import sys
import sysconfig
from collections.abc import Mapping
from importlib.machinery import ExtensionFileLoader
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

import torch

from cputrain.affinity.filesystem import cache_folder
from cputrain.comm.ccl.environment import Libraries
from cputrain.native_build import NativeExtension, ensure_compiled, loading, object_file

NAME = "cputrain_ccl"
NATIVE = Path(__file__).parent / "native"
MOST_UNITS = 4
REQUESTED_BY, ALTERNATIVE = "comm.backend=ccl", "set comm.backend=gloo"


def part(libraries: Libraries) -> NativeExtension:
    """The extension to compile against these libraries."""
    units = units_of(len(os.sched_getaffinity(0)))
    return NativeExtension(
        title=f"the oneCCL backend for torch {torch.__version__}",
        requested_by=REQUESTED_BY,
        alternative=ALTERNATIVE,
        parts=lambda cxx, output: tuple(
            compile_line(cxx, libraries, unit, object_file(output, number)) for number, unit in enumerate(units)
        ),
        argv=lambda cxx, output: link_line(
            cxx, libraries, tuple(object_file(output, number) for number in range(len(units))), output
        ),
    )


def units_of(cores: int) -> tuple[tuple[Path, ...], ...]:
    """The sources in groups that are compiled side by side; each reads PyTorch's headers, much of the work, once."""
    sources = sorted(NATIVE.glob("*.cpp"), key=lambda path: -path.stat().st_size)
    count = min(cores, MOST_UNITS)
    return tuple(tuple(sources[number::count]) for number in range(count))


def compile_line(cxx: str, libraries: Libraries, unit: tuple[Path, ...], output: Path) -> tuple[str, ...]:
    """The command that compiles sources as one."""
    torch_root = Path(torch.__file__).parent
    *others, last = map(str, unit)
    return (
        *(cxx, "-std=c++20", "-O1", "-fPIC", f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"),
        *_pybind11_flags(),
        *("-DAT_PER_OPERATOR_HEADERS", f"-I{NATIVE / 'operators'}", f"-I{libraries.include}"),
        *(f"-I{sysconfig.get_path('include')}", f"-I{torch_root}/include"),
        f"-I{torch_root}/include/torch/csrc/api/include",
        *(word for source in others for word in ("-include", source)),
        *("-c", last, "-o", str(output)),
    )


def link_line(cxx: str, libraries: Libraries, objects: tuple[Path, ...], output: Path) -> tuple[str, ...]:
    """The command that links the extension."""
    torch_lib = Path(torch.__file__).parent / "lib"
    # Searched before LD_LIBRARY_PATH, which may name oneCCL's GPU build: its library has the same name.
    rpath = tuple(f"-Wl,-rpath,{folder}" for folder in (libraries.ccl.parent, torch_lib))
    return (
        *(cxx, "-shared", "-Wl,--disable-new-dtags", *map(str, objects), "-o", str(output)),
        *(f"-L{torch_lib}", "-ltorch", "-ltorch_cpu", "-ltorch_python", "-lc10"),
        *(f"-L{libraries.ccl.parent}", f"-l:{libraries.ccl.name}", *rpath),
    )


def _pybind11_flags() -> tuple[str, ...]:
    """Torch's build names, which pybind11 before version 3 compares before it shares classes between extensions."""
    names = ("COMPILER_TYPE", "STDLIB", "BUILD_ABI")
    known = ((name, getattr(torch._C, f"_PYBIND11_{name}", None)) for name in names)
    return tuple(f'-DPYBIND11_{name}="{value}"' for name, value in known if value is not None)


def built_path(libraries: Libraries, env: Mapping[str, str]) -> Path:
    """The path of the compiled extension; its name is a hash of all that the extension depends on."""
    source = "".join(path.read_text(encoding="utf-8") for path in sorted(NATIVE.rglob("*.*")) if path.is_file())
    commands = (*compile_line("c++", libraries, (NATIVE,), Path(NAME)), *link_line("c++", libraries, (), Path(NAME)))
    parts = (source, torch.__version__, sys.version, platform.machine(), *commands)
    key = hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]
    return cache_folder(env) / f"ccl-torch{torch.__version__}-{platform.machine()}-{key}" / f"{NAME}.so"


def ensure_built(libraries: Libraries, env: Mapping[str, str]) -> Path:
    """The path of the extension, compiled by this process or another. Raises as ensure_compiled does."""
    return ensure_compiled(part(libraries), built_path(libraries, env), env)


def load(path: Path) -> ModuleType:
    """Import the compiled extension. Raises RunError where it does not load."""
    spec = spec_from_file_location(NAME, path, loader=ExtensionFileLoader(NAME, str(path)))
    assert spec is not None and spec.loader is not None
    with loading(path, REQUESTED_BY, ALTERNATIVE):
        module = module_from_spec(spec)
        spec.loader.exec_module(module)
    return module
