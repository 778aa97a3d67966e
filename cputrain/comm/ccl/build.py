"""The C++ part of the backend: compiled for this torch, Python and oneCCL."""

import hashlib
import platform
import sys
import sysconfig
from collections.abc import Mapping
from importlib.machinery import ExtensionFileLoader
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

import torch

from affinity.errors import RunError
from cputrain.comm.ccl.libraries import Libraries
from cputrain.native_build import NativeExtension, cache_folder, ensure_compiled

NAME = "cputrain_ccl"
NATIVE = Path(__file__).parent / "native"


def part(libraries: Libraries) -> NativeExtension:
    """The extension to compile against these libraries."""
    return NativeExtension(
        title=f"the oneCCL backend for torch {torch.__version__}",
        requested_by="comm.backend=ccl",
        alternative="set comm.backend=gloo",
        argv=lambda cxx, output: command_line(cxx, libraries, output),
    )


def command_line(cxx: str, libraries: Libraries, output: Path) -> tuple[str, ...]:
    """The command that compiles and links the extension."""
    torch_root = Path(torch.__file__).parent
    # Searched before LD_LIBRARY_PATH, which may name oneCCL's GPU build: its library has the same name.
    rpath = tuple(f"-Wl,-rpath,{folder}" for folder in (libraries.ccl.parent, torch_root / "lib"))
    return (
        *(cxx, "-std=c++20", "-O2", "-fPIC", "-shared", "-Wl,--disable-new-dtags"),
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
        *_pybind11_flags(),
        *(f"-I{libraries.include}", f"-I{sysconfig.get_path('include')}", f"-I{torch_root}/include"),
        f"-I{torch_root}/include/torch/csrc/api/include",
        str(NATIVE / "extension.cpp"),
        *("-o", str(output), f"-L{torch_root}/lib", "-ltorch", "-ltorch_cpu", "-ltorch_python", "-lc10"),
        *(f"-L{libraries.ccl.parent}", f"-l:{libraries.ccl.name}", *rpath),
    )


def _pybind11_flags() -> tuple[str, ...]:
    """Torch's build names, which pybind11 before version 3 compares before it shares classes between extensions."""
    names = ("COMPILER_TYPE", "STDLIB", "BUILD_ABI")
    known = ((name, getattr(torch._C, f"_PYBIND11_{name}", None)) for name in names)
    return tuple(f'-DPYBIND11_{name}="{value}"' for name, value in known if value is not None)


def built_path(libraries: Libraries, env: Mapping[str, str]) -> Path:
    """The path of the compiled extension; its name is a hash of all that the extension depends on."""
    source = "".join(path.read_text() for path in sorted(NATIVE.glob("*.?pp")))
    parts = (source, torch.__version__, sys.version, platform.machine(), *command_line("c++", libraries, Path(NAME)))
    key = hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]
    return cache_folder(env) / f"ccl-torch{torch.__version__}-{platform.machine()}-{key}" / f"{NAME}.so"


def ensure_built(libraries: Libraries, env: Mapping[str, str]) -> Path:
    """The path of the extension, compiled by this process or another. Raises as ensure_compiled does."""
    return ensure_compiled(part(libraries), built_path(libraries, env), env)


def load(path: Path) -> ModuleType:
    """Import the compiled extension. Raises RunError where it does not load."""
    spec = spec_from_file_location(NAME, path, loader=ExtensionFileLoader(NAME, str(path)))
    assert spec is not None and spec.loader is not None
    try:
        module = module_from_spec(spec)
        spec.loader.exec_module(module)
    except ImportError as error:
        raise RunError(f"comm.backend=ccl: cannot load {path}: {error}: remove it, or set comm.backend=gloo") from None
    return module
