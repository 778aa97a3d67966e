"""Checks of what is installed: torch, torchvision, allocator, decoder, compiler, oneCCL, MPI, network."""

import importlib.util
import re
import sys
import tempfile
from collections.abc import Iterator, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from cputrain.affinity.errors import InputError, RunError
from cputrain.affinity.filesystem import cache_folder, installed_version, try_cache
from cputrain.affinity.kernel.running import bound_processes
from cputrain.affinity.planner.openmp import Runtime, find_runtime, target_of
from cputrain.doctor.host import Check, error, ok, warning
from cputrain.mpi.fabric import FABRICS, fabric_here
from cputrain.mpi.hosts.hostfile import fold
from cputrain.mpi.hosts.schedulers import allocation
from cputrain.mpi.preflight.checks import missing_provider
from cputrain.native_build import compiler

CPU_INDEX = "--index-url https://download.pytorch.org/whl/cpu"  # PyTorch's own index of CPU builds
WITHOUT_CACHE = "no oneCCL, no native kernels, no fast decoder"
Probed = Mapping[str, Mapping[str, Any]]


def software_checks(probe: Probed, env: Mapping[str, str]) -> Iterator[Check]:
    """All checks of what is installed for this Python; `probe` is what the imports have found."""
    yield torch_check(probe["torch"])
    yield torchvision_check(probe["torchvision"], probe["torch"])
    try:
        runtime = find_runtime(target_of(()), env)
    except InputError as refused:
        yield error("OpenMP", str(refused), "unset LD_PRELOAD")
    else:
        yield from runtime_checks(runtime)
    yield decoder_check(probe["decoder"])
    yield compiler_check(compiler(env))
    yield cache_check(env)
    yield temporary_check()
    yield oneccl_check(probe["oneccl"])
    yield launcher_check(probe["launcher"])
    yield fabric_check(fabric_here(), env)
    yield binding_check()
    yield from job_check(env)


def torch_check(torch: Mapping[str, Any]) -> Check:
    """Whether torch can be imported, and is a release that cputrain is tested with."""
    wanted = required("torch", by="cputrain")
    if torch.get("late"):
        return warning("torch", f"{installed('torch')}: {torch['error']}", "run the command again")
    if "error" in torch:
        if broken := re.search(r"Failed to load the backend extension: ([\w.-]+)", torch["error"]):
            remedy = f"uninstall or repair what brings {broken[1]}, or set TORCH_DEVICE_BACKEND_AUTOLOAD=0"
            return error("torch", f"{installed('torch')}: {torch['error']}", remedy)
        remedy = f"pip install --force-reinstall '{wanted}' {CPU_INDEX}"
        return error("torch", f"{installed('torch')} cannot be imported: {torch['error']}", remedy)
    build = f"CUDA {torch['cuda']} build" if torch["cuda"] else "CPU build"
    found = f"{torch['version']} ({build}, {torch['capability']}), imported in {torch['import_s']:g} s"
    if not torch["onednn"]:
        return error("torch", f"{found}, without oneDNN", f"pip install --force-reinstall '{wanted}' {CPU_INDEX}")
    return ok("torch", found)


def torchvision_check(torchvision: Mapping[str, Any], torch: Mapping[str, Any]) -> Check:
    """Whether torchvision can be imported with this torch."""
    if "error" not in torchvision:
        return ok("torchvision", str(torchvision["version"]))
    if "error" in torch and not torch.get("late"):
        return error("torchvision", "not tried: torch cannot be imported", "repair torch first")
    found, cure = f"{installed('torchvision')}: {torchvision['error']}", matching_torchvision(installed("torch"))
    builds = {name: built_for(name) for name in ("torch", "torchvision")}
    if "torchvision::" in torchvision["error"] or len({*builds.values()} - {""}) > 1:
        differ = ", ".join(f"{name} is built for {build}" for name, build in builds.items() if build)
        if not torchvision.get("late"):
            differ = f"{torchvision['error']}: {differ}"
        return warning(
            "torchvision",
            f"{installed('torchvision')}: {differ}",
            f"{cure}; cputrain works around it, other programs fail with `operator torchvision::nms does not exist`",
        )
    if torchvision.get("late"):
        return ok("torchvision", found)
    return error("torchvision", found, cure)


def built_for(package: str) -> str:
    """What torch or torchvision was built for, read without importing it: "cpu", "cu130"; "" where it does not tell."""
    spec = importlib.util.find_spec(package)
    path = Path(spec.origin).with_name("version.py") if spec and spec.origin else None
    source = path.read_text(encoding="utf-8") if path is not None and path.is_file() else ""
    tag = re.search(r"^__version__ = '[^'+]*\+(\w+)'", source, re.MULTILINE)
    return tag[1] if tag else ""


def matching_torchvision(torch: str) -> str:
    """The command that installs the torchvision of a torch release: 0.23 goes with 2.8, 0.28 with 2.13."""
    numbers = re.search(r"\b2\.(\d+)", torch)
    release = f"torchvision==0.{int(numbers[1]) + 15}.*" if numbers else "torchvision"
    return f"pip install --force-reinstall --no-deps '{release}' {CPU_INDEX}"


def runtime_checks(runtime: Runtime) -> Iterator[Check]:
    """The OpenMP runtime, the memory allocator, and what LD_PRELOAD names."""
    yield ok("OpenMP", f"{runtime.openmp}: {runtime.origin}")
    if runtime.allocator == "glibc":
        yield warning("memory allocator", "glibc", "5 to 15 % faster: apt install libtcmalloc-minimal4, or jemalloc")
    else:
        yield ok("memory allocator", runtime.allocator)
    if runtime.missing:
        yield warning("LD_PRELOAD", f"not there: {', '.join(runtime.missing)}", "correct or unset LD_PRELOAD")


def decoder_check(decoder: Mapping[str, Any]) -> Check:
    """libjpeg-turbo 3, or Pillow instead."""
    if "error" in decoder:
        return warning("libjpeg-turbo", "Pillow decodes, at a third of the speed", "pip install 'cputrain[turbo]'")
    return ok("libjpeg-turbo", str(decoder["library"]))


def compiler_check(found: str | None) -> Check:
    """The compiler of the native parts."""
    if found is None:
        return warning("C++ compiler", "none: no oneCCL, no native kernels", "apt install g++, or module load gcc")
    return ok("C++ compiler", found)


def cache_check(env: Mapping[str, str]) -> Check:
    """The folder of compiled code, tried out."""
    try:
        folder = cache_folder(env)
    except RunError as refused:
        found, _, remedy = str(refused).partition(": ")
        return warning("cache", f"{found}: {WITHOUT_CACHE}", remedy)
    try:
        try_cache(folder)
    except OSError as refused:
        found = f"{folder}: {refused.strerror}: {WITHOUT_CACHE}"
        return warning("cache", found, "set CPUTRAIN_CACHE to a folder that can be written to, and execute code")
    return ok("cache", str(folder))


def temporary_check() -> Check:
    """The folder of temporary files, tried out."""
    try:
        folder = Path(tempfile.gettempdir())
        try_cache(folder)
    except FileNotFoundError as refused:
        return error("temporary files", str(refused.strerror), "set TMPDIR to a folder that can be written to")
    except OSError as refused:
        remedy = "only engine=compile needs it: set TMPDIR, or TORCHINDUCTOR_CACHE_DIR, to a folder elsewhere"
        return warning("temporary files", f"{folder}: {refused.strerror}", remedy)
    return ok("temporary files", str(folder))


def oneccl_check(found: Mapping[str, Any]) -> Check:
    """oneCCL and the MPI that it loads."""
    if "error" in found:
        why = str(found["error"]).partition("comm.backend=ccl: ")[2] or str(found["error"])
        return warning("oneCCL", f"gloo communicates: {why}", 'pip install "cputrain[ccl]"')
    compiled = "compiled" if found["compiled"] else "not compiled yet: cputrain doctor ccl does it"
    return ok("oneCCL", f"{found['version']}, {compiled}: {found['library']}")


def launcher_check(found: Mapping[str, Any]) -> Check:
    """What starts ranks on several hosts."""
    if "error" in found:
        why = str(found["error"]).removeprefix("InputError: ")
        return warning("launcher", why, "only several hosts need one: module load an MPI, or work inside Slurm")
    return ok("launcher", " ".join(filter(None, (found["name"], found["version"], found["program"]))))


def fabric_check(fabric: str, env: Mapping[str, str]) -> Check:
    """The network between hosts, and whether libfabric has its provider."""
    settings = {name: value for name, value, _ in FABRICS[fabric].settings}
    provider = env.get("FI_PROVIDER", settings.get("FI_PROVIDER"))
    missing = missing_provider(provider)
    if missing:
        remedy = "install that provider, or choose another network with --fabric; Intel MPI brings its own"
        return warning("network", f"{fabric}, but fi_info lists no provider {missing}", remedy)
    return ok("network", f"{fabric} (libfabric provider {provider})")


def binding_check() -> Check:
    """Running processes that a plan has bound."""
    processes = bound_processes()
    differing = [str(process.pid) for process in processes if process.differs]
    if differing:
        found = f"not where planned: pid {', '.join(differing[:8])}"
        return error("bound processes", found, "cputrain doctor affinity tells how")
    running = len(processes)
    return ok("bound processes", f"{running} as planned" if running else "none is running")


def job_check(env: Mapping[str, str]) -> Iterator[Check]:
    """The scheduler's job around this process, if there is one, and whether its hosts are known."""
    try:
        found = allocation(env)
    except InputError as refused:
        yield error("job", str(refused), "name the hosts with --hosts")
        return
    if found is None:
        return
    if not found.hosts:
        yield warning("job", f"{found.title}: its hosts are not known", f"name them with {found.scheduler.give}")
    elif found.note:
        yield warning("job", f"{found.title}: {fold([host.name for host in found.hosts])}", found.note)
    else:
        yield ok("job", f"{found.title}: {fold([host.name for host in found.hosts])}")


def installed(package: str) -> str:
    """A package with its version."""
    return f"{package} {installed_version(package) or f'(not installed in {sys.prefix})'}"


def required(package: str, *, by: str) -> str:
    """A package with the versions that another one requires."""
    try:
        listed = metadata.requires(by) or []
    except metadata.PackageNotFoundError:
        listed = []
    return next((each for each in listed if re.match(rf"{package}\b(?!-)", each)), package)
