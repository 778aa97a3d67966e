"""Checks of the software (torch, torchvision, allocator, decoder, compiler, oneCCL, MPI) for trainings, and the facts
for bug reports. Works without torch; checks of the hardware and the system are in host_checks.py.

Imports that may fail run in a separate process: python -m cputrain.doctor prints a line of JSON per part as soon as it
is known, so that a crash or a slow disk affects only the parts that follow.
"""

import importlib.util
import json
import os
import platform
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any

import cputrain
from cputrain.affinity.bound_plan import bound_processes
from cputrain.affinity.errors import InputError, RunError
from cputrain.affinity.filesystem import cache_folder, installed_version, try_cache, write_failure
from cputrain.affinity.planner.openmp import Runtime, find_runtime, target_of
from cputrain.affinity.start import isolated_command
from cputrain.affinity.terminal import align_columns, use_utf8
from cputrain.affinity.topology.machine import format_list
from cputrain.affinity.topology.sysfs import this_machine
from cputrain.affinity.wording import MIB, memory_text
from cputrain.host_checks import OK, Check, error, ok, read_meminfo, shm_size, warning
from cputrain.mpi.fabric import FABRICS, fabric_here
from cputrain.mpi.hostfile import fold_hosts
from cputrain.mpi.preflight import missing_provider, offered_providers
from cputrain.mpi.schedulers import scheduler_allocation
from cputrain.native_build import compiler
from cputrain.variables import shown_variables

PACKAGES = (
    *("cputrain", "torch", "torchvision", "numpy", "pillow", "pydantic", "click", "rich", "psutil", "safetensors"),
    *("timm", "oneccl-devel", "impi-rt", "turbojpeg", "intel-openmp", "mpi4py", "intel-extension-for-pytorch"),
)

CPU_INDEX = "--index-url https://download.pytorch.org/whl/cpu"  # PyTorch's own index of CPU builds
CACHE_BYTES = 4 * MIB  # oneCCL's compiled backend has 1 MiB, and needs as much again while compiling
NATIVE_PARTS = (ONECCL := "oneCCL", "native kernels", "fast decoder")
Probed = Mapping[str, Mapping[str, Any]]

Found = dict[str, Any]
Env = Mapping[str, str]


def host_facts(
    probe: Mapping[str, Mapping[str, Any]], checks: tuple[Check, ...], env: Mapping[str, str]
) -> dict[str, Any]:
    """Return what affects trainings on this host and this Python; `checks` are those of the imports."""
    kib = read_meminfo(Path("/"))
    return {
        "cputrain": {"version": cputrain.__version__, "folder": str(Path(cputrain.__file__).parent)},
        "python": {"version": platform.python_version(), "program": sys.executable, "prefix": sys.prefix},
        "system": {
            "host": platform.node(),
            "os": _os_name(),
            "kernel": platform.release(),
            "libc": " ".join(platform.libc_ver()),
            "architecture": platform.machine(),
        },
        "cpu": _cpu(),
        "memory": {
            "total_bytes": 1024 * kib["MemTotal"],
            "available_bytes": 1024 * kib["MemAvailable"],
            "shm_bytes": shm_size(),
        },
        "packages": {name: installed_version(name) for name in PACKAGES},
        "libraries": {**_runtime(env), "compiler": compiler(env), "fabric": fabric_here(), **probe},
        "variables": shown_variables(env),
        "problems": [f"{check.name}: {check.found}: {check.remedy}" for check in checks if check.status != OK],
    }


def facts_text(values_by_title: Mapping[str, Any]) -> str:
    """Format the facts in blocks of aligned lines."""
    blocks = []
    for title, values in values_by_title.items():
        if isinstance(values, Mapping):
            rows = [(f"  {name}", _cell(name, value)) for name, value in values.items() if value is not None]
        else:
            rows = [("  -", value) for value in values]
        blocks.append(f"{title}\n{align_columns(rows) if rows else '  none'}")
    return "\n".join(blocks)


def _cell(name: str, value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {entry}" for key, entry in value.items() if entry is not None)
    if isinstance(value, list):
        return ", ".join(map(str, value))
    return memory_text(value) if name.endswith("_bytes") else " ".join(str(value).split())


def _cpu() -> dict[str, Any]:
    try:
        machine = this_machine()
    except InputError as refused:
        return {"error": str(refused)}
    return {
        "model": machine.model,
        "features": list(machine.isa),
        "packages": len(machine.packages),
        "numa_nodes": len(machine.numa_nodes),
        "cores": len(machine.cores),
        "cpus": len(machine.pus),
        "allowed_cpus": format_list(machine.allowed_pus),
        "cpu_quota": machine.cpu_quota,
        "memory_limit_bytes": machine.memory_limit_bytes,
    }


def _runtime(env: Mapping[str, str]) -> dict[str, str]:
    try:
        runtime = find_runtime(target_of(()), env)
    except InputError as refused:
        return {"openmp": str(refused)}
    return {"openmp": f"{runtime.openmp}: {runtime.origin}", "allocator": runtime.allocator}


def _os_name() -> str:
    try:
        return platform.freedesktop_os_release()["PRETTY_NAME"]
    except OSError:  # no os-release
        return platform.system()


def software_checks(probe: Probed, env: Mapping[str, str]) -> Iterator[Check]:
    """Yield all checks of the software installed for this Python; `probe` has the results of the imports."""
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
    cache = cache_check(env, {**probe["native"], ONECCL: probe["oneccl"].get("compiled")})
    yield cache
    yield temporary_check()
    yield oneccl_check(probe["oneccl"], cache)
    yield launcher_check(probe["launcher"])
    yield fabric_check(fabric_here(), env)
    yield binding_check()
    yield from job_check(env)


def torch_check(torch: Mapping[str, Any]) -> Check:
    """Check whether torch can be imported, and is a supported release."""
    requirement = required("torch", by="cputrain")
    if torch.get("late"):
        return warning("torch", f"{installed('torch')}: {torch['error']}", "run the command again")
    if "error" in torch:
        if broken := re.search(r"Failed to load the backend extension: ([\w.-]+)", torch["error"]):
            remedy = f"uninstall or repair the package of {broken[1]}, or set TORCH_DEVICE_BACKEND_AUTOLOAD=0"
            return error("torch", f"{installed('torch')}: {torch['error']}", remedy)
        remedy = f"pip install --force-reinstall '{requirement}' {CPU_INDEX}"
        return error("torch", f"{installed('torch')} cannot be imported: {torch['error']}", remedy)
    build = f"CUDA {torch['cuda']} build" if torch["cuda"] else "CPU build"
    description = f"{torch['version']} ({build}, {torch['capability']}), imported in {torch['import_s']:g} s"
    if not torch["onednn"]:
        return error(
            "torch", f"{description}, without oneDNN", f"pip install --force-reinstall '{requirement}' {CPU_INDEX}"
        )
    return ok("torch", description)


def torchvision_check(torchvision: Mapping[str, Any], torch: Mapping[str, Any]) -> Check:
    """Check whether torchvision can be imported with this torch."""
    if "error" not in torchvision:
        return ok("torchvision", str(torchvision["version"]))
    if "error" in torch and not torch.get("late"):
        return error("torchvision", "not tried, as torch cannot be imported", "repair torch first")
    description, cure = f"{installed('torchvision')}: {torchvision['error']}", matching_torchvision(installed("torch"))
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
        return ok("torchvision", description)
    return error("torchvision", description, cure)


def built_for(package: str) -> str:
    """Return what torch or torchvision was built for, such as "cpu" or "cu130", without importing it; "" if unknown."""
    spec = importlib.util.find_spec(package)
    path = Path(spec.origin).with_name("version.py") if spec and spec.origin else None
    source = path.read_text(encoding="utf-8") if path is not None and path.is_file() else ""
    tag = re.search(r"^__version__ = '[^'+]*\+(\w+)'", source, re.MULTILINE)
    return tag[1] if tag else ""


def matching_torchvision(torch: str) -> str:
    """Return the command that installs the torchvision of a torch release: 0.23 for 2.8, 0.28 for 2.13."""
    numbers = re.search(r"\b2\.(\d+)", torch)
    release = f"torchvision==0.{int(numbers[1]) + 15}.*" if numbers else "torchvision"
    return f"pip install --force-reinstall --no-deps '{release}' {CPU_INDEX}"


def runtime_checks(runtime: Runtime) -> Iterator[Check]:
    """Check the OpenMP runtime, the memory allocator, and the libraries in LD_PRELOAD."""
    yield ok("OpenMP", f"{runtime.openmp}: {runtime.origin}")
    if runtime.allocator == "glibc":
        yield warning("memory allocator", "glibc", "apt install libtcmalloc-minimal4, or jemalloc; 5 to 15 % faster")
    else:
        yield ok("memory allocator", runtime.allocator)
    if runtime.missing:
        yield warning("LD_PRELOAD", f"missing: {', '.join(runtime.missing)}", "correct or unset LD_PRELOAD")


def decoder_check(decoder: Mapping[str, Any]) -> Check:
    """Check for libjpeg-turbo 3; Pillow is the fallback."""
    if "error" in decoder:
        return warning("libjpeg-turbo", "Pillow decodes, at a third of the speed", "pip install 'cputrain[turbo]'")
    return ok("libjpeg-turbo", str(decoder["library"]))


def compiler_check(path: str | None) -> Check:
    """Check the compiler of the native parts."""
    if path is None:
        return warning("C++ compiler", "none: no oneCCL, no native kernels", "apt install g++, or module load gcc")
    return ok("C++ compiler", path)


def cache_check(env: Mapping[str, str], compiled: Mapping[str, object]) -> Check:
    """Check the cache of compiled code by writing to it; `compiled` maps NATIVE_PARTS to whether they can be loaded."""
    lacking = ", ".join(f"no {name}" for name in NATIVE_PARTS if not compiled.get(name))
    try:
        folder = cache_folder(env)
    except RunError as refused:
        problem, _, remedy = str(refused).partition(": ")
        return warning("cache", f"{problem}: {lacking}", remedy)
    try:
        try_cache(folder, CACHE_BYTES)
    except OSError as refused:
        problem = f"{folder}: {write_failure(refused, folder)}: "
        if not lacking:
            return ok("cache", f"{problem}contains all native parts, but measurements cannot be saved")
        remedy = "set CPUTRAIN_CACHE to a writable folder that allows execution"
        return warning("cache", problem + lacking, remedy)
    return ok("cache", str(folder))


def temporary_check() -> Check:
    """Check the folder of temporary files by writing to it."""
    try:
        folder = Path(tempfile.gettempdir())
        try_cache(folder)
    except FileNotFoundError as refused:
        return error("temporary files", str(refused.strerror), "set TMPDIR to a writable folder")
    except OSError as refused:
        remedy = "only engine=compile needs it; set TMPDIR, or TORCHINDUCTOR_CACHE_DIR, to another folder"
        return warning("temporary files", f"{folder}: {refused.strerror}", remedy)
    return ok("temporary files", str(folder))


def oneccl_check(facts_of_ccl: Mapping[str, Any], cache: Check) -> Check:
    """Check oneCCL and the MPI that it loads; `cache` is the check of the folder for its compiled backend."""
    if "error" in facts_of_ccl:
        why = str(facts_of_ccl["error"]).partition("comm.backend=ccl: ")[2] or str(facts_of_ccl["error"])
        return warning("oneCCL", f"gloo communicates: {why}", 'pip install "cputrain[ccl]"')
    if not facts_of_ccl["compiled"] and cache.status != OK:
        why = f"{facts_of_ccl['version']} is not compiled, and there is no usable cache"
        return warning("oneCCL", f"gloo communicates: {why}", cache.remedy)
    compiled = "compiled" if facts_of_ccl["compiled"] else "not compiled yet: run cputrain doctor ccl"
    return ok("oneCCL", f"{facts_of_ccl['version']} ({facts_of_ccl['library']}), {compiled}")


def launcher_check(facts_of_launcher: Mapping[str, Any]) -> Check:
    """Check the launcher for several hosts."""
    if "error" in facts_of_launcher:
        why = str(facts_of_launcher["error"]).removeprefix("InputError: ")
        return warning("launcher", why, "needed only for several hosts: module load an MPI, or work inside Slurm")
    return ok(
        "launcher",
        " ".join(filter(None, (facts_of_launcher["name"], facts_of_launcher["version"], facts_of_launcher["program"]))),
    )


def fabric_check(fabric: str, env: Mapping[str, str]) -> Check:
    """Check the network between hosts, and whether libfabric has its provider."""
    settings = {name: value for name, value, _ in FABRICS[fabric].settings}
    provider = env.get("FI_PROVIDER", settings.get("FI_PROVIDER"))
    offered = offered_providers(os.get_exec_path(env))
    missing = missing_provider(provider, offered)
    if missing:
        remedy = "install that provider, or choose another network with --fabric; Intel MPI includes its own"
        return warning("network", f"{fabric}, but fi_info lists no provider {missing}", remedy)
    unknown = "" if offered or provider is None else "; not checked, as no fi_info here lists providers"
    return ok("network", f"{fabric} (libfabric provider {provider}{unknown})")


def binding_check() -> Check:
    """Check the running processes that a plan has bound."""
    processes = bound_processes()
    differing = [str(process.pid) for process in processes if process.differs]
    if differing:
        problem = f"not bound as planned: pid {', '.join(differing[:8])}"
        return error("bound processes", problem, "see cputrain doctor affinity")
    running = len(processes)
    return ok("bound processes", f"{running} as planned" if running else "none is running")


def job_check(env: Mapping[str, str]) -> Iterator[Check]:
    """Check the scheduler's job around this process, if any, and whether its hosts are known."""
    try:
        allocated = scheduler_allocation(env)
    except InputError as refused:
        yield error("job", str(refused), "name the hosts with --hosts")
        return
    if allocated is None:
        return
    if allocated.alone:
        yield ok("job", allocated.title)
    elif not allocated.hosts:
        yield warning(
            "job", f"{allocated.title}: its hosts are not known", f"name them with {allocated.scheduler.give}"
        )
    elif allocated.note:
        yield warning(
            "job", f"{allocated.title}: {fold_hosts([host.name for host in allocated.hosts])}", allocated.note
        )
    else:
        yield ok("job", f"{allocated.title}: {fold_hosts([host.name for host in allocated.hosts])}")


def installed(package: str) -> str:
    """Return a package with its version."""
    return f"{package} {installed_version(package) or f'(not installed in {sys.prefix})'}"


def required(package: str, *, by: str) -> str:
    """Return what a package requires of another, such as 'torch>=2.8', or its bare name if it requires nothing."""
    try:
        listed = metadata.requires(by) or []
    except metadata.PackageNotFoundError:
        listed = []
    return next((requirement for requirement in listed if re.match(rf"{package}\b(?!-)", requirement)), package)


def _launcher(env: Env) -> Found:
    """Find the launcher on PATH, with its version."""
    from cputrain.mpi.launch_command import find_launcher

    launcher = find_launcher("auto", env)
    return {
        "name": launcher.launcher.name,
        "version": ".".join(map(str, launcher.version)),
        "program": launcher.program,
    }


def _decoder(_env: Env) -> Found:
    """Find libjpeg-turbo 3."""
    from cputrain.data.pixels import find_library

    return {"library": find_library()}


def _torch(_env: Env) -> Found:
    """Import torch: its build, and what its kernels may use."""
    started = time.monotonic()
    import torch

    backends: Any = torch.backends
    return {
        "version": torch.__version__,
        "cuda": torch.version.cuda,
        "capability": backends.cpu.get_cpu_capability(),
        "onednn": backends.mkldnn.is_available(),
        "mkl": backends.mkl.is_available(),
        "openmp": backends.openmp.is_available(),
        "threads": torch.get_num_threads(),
        "import_s": round(time.monotonic() - started, 2),
    }


def _oneccl(env: Env) -> Found:
    """Find oneCCL, Intel MPI's library, libfabric, and the compiled backend."""
    from cputrain.affinity.errors import RunError
    from cputrain.comm.ccl.environment import extension_path, find_libraries
    from cputrain.native_build import is_usable

    libraries = find_libraries(env)
    built = None
    with suppress(RunError):  # no cache folder
        built = extension_path(libraries, env)
    return {
        "version": ".".join(map(str, libraries.version)),
        "library": str(libraries.ccl),
        "mpi": str(libraries.mpi),
        "fabric": str(libraries.fabric),
        "compiled": str(built) if built and is_usable(built) else None,
    }


def _native(env: Env) -> Found:
    """Check whether the other native parts are compiled in the cache and can be loaded from there."""
    from cputrain.affinity.errors import RunError
    from cputrain.data import pixels
    from cputrain.kernels import batchnorm
    from cputrain.native_build import is_usable

    facts_of_native: Found = {}
    with suppress(RunError):  # no cache folder
        facts_of_native["native kernels"] = is_usable(batchnorm.LIBRARY.path(env))
        facts_of_native["fast decoder"] = is_usable(pixels.decoder_path(env))
    return facts_of_native


def _torchvision(_env: Env) -> Found:
    """Import torchvision as other programs do; this part is last, as it is slow and the others do not need it."""
    import torchvision

    return {"version": torchvision.__version__}


PARTS: dict[str, Callable[[Env], Found]] = {
    "launcher": _launcher,
    "decoder": _decoder,
    "torch": _torch,
    "oneccl": _oneccl,
    "native": _native,
    "torchvision": _torchvision,
}


def main(env: Env) -> None:
    """Print each part: what was found, or the error of its import."""
    for name, part in PARTS.items():
        try:
            result = part(env)
        except (Exception, SystemExit) as error:  # noqa: BLE001
            result = {"error": f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"}
        os.write(1, json.dumps({name: result}).encode() + b"\n")


def start_probe(env: Mapping[str, str]) -> "subprocess.Popen[bytes]":
    """Start the process that runs the imports."""
    command = isolated_command("cputrain.doctor")
    return subprocess.Popen(
        command,
        env=dict(env),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )


def probe_results(process: "subprocess.Popen[bytes]", timeout_s: float) -> dict[str, Found]:
    """Return the results of the probe after at most `timeout_s` seconds. Parts that it did not reach have an "error",
    and "late" is true if the time was too short."""
    why, late = "", False
    try:
        out, _ = process.communicate(timeout=timeout_s)
        if process.returncode:
            ended = process.returncode
            why = f"the import ended with {signal.Signals(-ended).name if ended < 0 else f'status {ended}'}"
    except subprocess.TimeoutExpired:
        why, late = f"no answer after {timeout_s:g} s: a slow disk, or a busy host", True
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        out, _ = process.communicate()
    results: dict[str, Found] = {}
    for line in out.splitlines():
        with suppress(ValueError):  # not JSON: printed by an import
            value = json.loads(line)
            results |= value if isinstance(value, dict) else {}
    missing = [name for name in PARTS if name not in results]
    for name in missing:
        results[name] = {"error": why if late or name == missing[0] else f"not reached: {why}", "late": late}
    return results


if __name__ == "__main__":
    use_utf8()
    main(os.environ)
