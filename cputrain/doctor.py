"""The facts of a bug report about this host, and checks with remedies: of the host (kernel, cores, memory, limits,
network) and of the software (torch, torchvision, allocator, decoder, compiler, oneCCL, MPI). Works without torch.

Imports that may fail run in a separate process: python -m cputrain.doctor prints a line of JSON per part as soon as it
is known, so that a crash or a slow disk affects only the parts that follow.
"""

import importlib.util
import json
import os
import platform
import re
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import cputrain
from cputrain.affinity.errors import InputError, RunError
from cputrain.affinity.filesystem import cache_folder, cause, installed_version, try_cache
from cputrain.affinity.kernel.bound_plan import bound_processes
from cputrain.affinity.planner.openmp import Runtime, find_runtime, target_of
from cputrain.affinity.start import isolated_command
from cputrain.affinity.terminal import align_columns, use_utf8
from cputrain.affinity.topology.kernel_files import text
from cputrain.affinity.topology.machine import Machine, format_list
from cputrain.affinity.topology.sysfs import read_machine, this_machine
from cputrain.affinity.wording import GIB, MIB, memory_text, plural
from cputrain.mpi.fabric import FABRICS, fabric_here
from cputrain.mpi.hosts.hostfile import fold
from cputrain.mpi.hosts.schedulers import allocation
from cputrain.mpi.preflight import missing_provider, offered_providers
from cputrain.native_build import compiler
from cputrain.variables import shown_variables

OK, WARNING, ERROR = "ok", "warning", "error"


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """What was checked, what was found, and a remedy; "" if none is needed.

    The status is OK, WARNING (slower or less than possible) or ERROR (something does not work).
    """

    name: str
    status: str
    found: str
    remedy: str = ""


def ok(name: str, found: str) -> Check:
    """Return a check without problems."""
    return Check(name=name, status=OK, found=found)


def warning(name: str, found: str, remedy: str) -> Check:
    """Return a check for something that is slower or less than it could be."""
    return Check(name=name, status=WARNING, found=found, remedy=remedy)


def error(name: str, found: str, remedy: str) -> Check:
    """Return a check for something that does not work."""
    return Check(name=name, status=ERROR, found=found, remedy=remedy)


def checks_text(checks: Sequence[Check]) -> str:
    """Format a line per check with its remedy below, then a summary and the next step."""
    width = max(len(check.name) for check in checks)
    lines = []
    for check in checks:
        lines.append(f"{check.status:<7}  {check.name:<{width}}  {check.found}")
        if check.remedy:
            lines.append(f"{'':<7}  {'':<{width}}  -> {check.remedy}")
    counts = [sum(check.status == status for check in checks) for status in (OK, WARNING, ERROR)]
    lines.append(f"\n{counts[0]} ok, {plural(counts[1], 'warning')}, {plural(counts[2], 'error')}")
    broken = next((check for check in checks if check.status == ERROR), None)
    lines.append(f"next: {broken.name}: {broken.remedy}" if broken else "next: cputrain plan")
    return "\n".join(lines)


SHM_BYTES = GIB  # for DataLoader processes and MPI's shared memory; Docker's default is 64 MiB
LEAST_FILES, LEAST_PROCESSES = 4096, 4096
LEAST_MEMORY = 2 * GIB  # torch alone needs 0.4 GiB per worker
RDMA = ("opa", "psm3", "ib", "efa", "slingshot")
UNLIMITED = resource.RLIM_INFINITY


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessLimits:
    """Soft limits of a process: locked memory and address space in bytes, open files, processes; -1: unlimited."""

    locked_bytes: int
    address_bytes: int
    files: int
    processes: int


def current_limits() -> ProcessLimits:
    """Return the limits of this process."""
    names = ("MEMLOCK", "AS", "NOFILE", "NPROC")
    locked, address, files, processes = (resource.getrlimit(getattr(resource, f"RLIMIT_{name}"))[0] for name in names)
    return ProcessLimits(locked_bytes=locked, address_bytes=address, files=files, processes=processes)


def host_checks(root: Path, limits: ProcessLimits, shm_bytes: int | None) -> Iterator[Check]:
    """Yield all checks of the host under `root`; `shm_bytes` is the size of its /dev/shm, None without one."""
    try:
        machine = this_machine() if root == Path("/") else read_machine(root)
    except InputError as refused:
        yield error("processor", str(refused), "attach the file that cputrain machine save writes to a bug report")
    else:
        yield processor(machine, virtual=is_virtual(root))
        yield from control_groups(machine)
    yield governor(root)
    yield transparent_huge_pages(root)
    yield reserved_huge_pages(root)
    yield locked_memory(limits, fabric_here(root))
    yield from process_limits(limits)
    yield shared_memory(shm_bytes)


def shm_size(path: Path = Path("/dev/shm")) -> int | None:
    """Return the size of the shared-memory file system; None without one."""
    if not path.is_dir():
        return None
    found = os.statvfs(path)
    return found.f_blocks * found.f_frsize


def is_virtual(root: Path) -> bool:
    """Whether the host is a virtual machine according to its CPU flags."""
    cpuinfo = root / "proc/cpuinfo"
    return cpuinfo.is_file() and re.search(r"^flags\s*:.*\bhypervisor\b", text(cpuinfo), re.MULTILINE) is not None


def processor(machine: Machine, *, virtual: bool) -> Check:
    """Check the instruction sets that oneDNN's kernels need."""
    known = set(machine.isa)
    found = f"{machine.model}: {', '.join(machine.isa) or 'no instruction set of the fast kernels in oneDNN'}"
    if known & {"avx512f", "sve", "asimd"}:
        return ok("processor", found)
    hidden = "if the host has AVX-512, give the virtual machine its processor (QEMU: -cpu host)"
    if "avx2" in known:
        remedy = hidden if virtual else "convolutions run at half the speed of AVX-512; bf16 is emulated, keep float32"
        return ok("processor", found) if not virtual else warning("processor", f"{found}, no AVX-512", remedy)
    return error("processor", found, hidden if virtual else "use a host with AVX2 or AVX-512")


def control_groups(machine: Machine) -> Iterator[Check]:
    """Check the limits of CPUs, CPU time and memory."""
    cores, allowed = len(machine.cores), len(machine.allowed_cores)
    found, quota = f"{allowed} of {plural(cores, 'core')}", machine.cpu_quota
    if not allowed:
        yield error("CPUs allowed", found, "the cpuset and the affinity mask have no common CPU: fix them")
    elif quota is not None and quota < allowed:
        yield warning(
            "CPUs allowed",
            f"{found}, limited to the time of {quota:g} CPUs (cgroup quota)",
            "give it whole CPUs (Kubernetes: Guaranteed pods, static CPU manager; Docker: --cpuset-cpus, not --cpus)",
        )
    else:
        yield ok("CPUs allowed", found)
    if isolated := [pu for pu in machine.allowed_pus if pu in machine.isolated_pus]:
        yield warning(
            "isolated CPUs",
            f"{format_list(isolated)} (isolcpus): the scheduler does not balance threads between them",
            f"plans avoid them if there are others; --cores {format_list(isolated)} plans them",
        )
    for contradiction in machine.warnings:
        yield warning("topology", contradiction, "check the plan that cputrain plan prints")
    total = sum(node.memory_bytes for node in machine.numa_nodes)
    limit = machine.memory_limit_bytes
    found = memory_text(total) + ("" if limit is None else f", of which the control group allows {memory_text(limit)}")
    if min(total, limit or total) < LEAST_MEMORY:
        yield warning("memory", found, f"a worker needs 1 GiB or more; raise the limit to {memory_text(LEAST_MEMORY)}")
    else:
        yield ok("memory", found)


def governor(root: Path) -> Check:
    """Check the clock governor."""
    folder = root / "sys/devices/system/cpu"
    names = {text(path) for path in folder.glob("cpu[0-9]*/cpufreq/scaling_governor")}
    preferences = {text(path) for path in folder.glob("cpu[0-9]*/cpufreq/energy_performance_preference")}
    if not names:
        return ok("clock governor", "not visible here: this is a virtual machine, or the firmware sets the clock")
    found = ", ".join(sorted(names)) + (f" ({', '.join(sorted(preferences))})" if preferences else "")
    if names <= {"performance", "schedutil"} or preferences == {"performance"}:
        return ok("clock governor", found)
    return warning("clock governor", found, "cpupower frequency-set -g performance")


def transparent_huge_pages(root: Path) -> Check:
    """Check whether large tensors get pages of 2 MiB."""
    path = root / "sys/kernel/mm/transparent_hugepage/enabled"
    if not path.is_file():
        return ok("transparent huge pages", "not in this kernel")
    chosen = re.search(r"\[(\w+)\]", text(path))
    found = chosen[1] if chosen else text(path)
    if found == "never":
        return warning("transparent huge pages", found, f"echo madvise > /{path.relative_to(root)}")
    return ok("transparent huge pages", found)


def reserved_huge_pages(root: Path) -> Check:
    """Check for memory reserved as huge pages, which torch's tensors cannot use."""
    values = _meminfo(root)
    size = values.get("HugePages_Total", 0) * values.get("Hugepagesize", 0) * 1024
    free = values.get("HugePages_Free", 0) * values.get("Hugepagesize", 0) * 1024
    total = values.get("MemTotal", 0) * 1024
    if free > total / 20:
        found = f"{memory_text(size)} reserved, {memory_text(free)} of it unused"
        return warning("reserved huge pages", found, "sysctl vm.nr_hugepages=0, as torch cannot use them")
    return ok("reserved huge pages", memory_text(size) if size else "none")


def locked_memory(limits: ProcessLimits, fabric: str) -> Check:
    """Check the limit of locked memory, which network cards need."""
    limit = limits.locked_bytes
    found = "unlimited" if limit == UNLIMITED else memory_text(limit)
    if limit != UNLIMITED and fabric in RDMA:
        remedy = "the network here pins memory; set `* soft memlock unlimited` and hard in limits.conf, or Slurm's "
        return error("locked memory", f"{found} (ulimit -l)", f"{remedy}PropagateResourceLimitsExcept=MEMLOCK")
    return ok("locked memory", f"{found} (ulimit -l)")


def process_limits(limits: ProcessLimits) -> Iterator[Check]:
    """Check the limits of open files, processes and address space."""
    for name, limit, least, flag in (
        ("open files", limits.files, LEAST_FILES, "-n"),
        ("processes", limits.processes, LEAST_PROCESSES, "-u"),
    ):
        found = "unlimited" if limit == UNLIMITED else f"{limit:,}"
        if limit != UNLIMITED and limit < least:
            yield warning(name, f"{found} (ulimit {flag})", f"ulimit {flag} {least}, or more")
        else:
            yield ok(name, f"{found} (ulimit {flag})")
    if limits.address_bytes != UNLIMITED:
        found = f"{memory_text(limits.address_bytes)} (ulimit -v)"
        yield warning("address space", found, "torch maps much more than it uses: ulimit -v unlimited")


def shared_memory(size: int | None) -> Check:
    """Check the size of /dev/shm, for data-loader processes and MPI inside a host."""
    if size is None:
        return error("/dev/shm", "missing", "mount -t tmpfs tmpfs /dev/shm")
    if size < SHM_BYTES:
        remedy = "Docker: --shm-size=8g or --ipc=host; Kubernetes: an emptyDir of medium Memory at /dev/shm"
        return warning("/dev/shm", f"{size / MIB:,.0f} MiB", remedy)
    return ok("/dev/shm", memory_text(size))


def _meminfo(root: Path) -> Mapping[str, int]:
    """Parse /proc/meminfo: values in KiB or pages; {} if there is none."""
    path = root / "proc/meminfo"
    lines = text(path).splitlines() if path.is_file() else []
    found = (re.match(r"(\w+):\s+(\d+)", line) for line in lines)
    return {each[1]: int(each[2]) for each in found if each}


PACKAGES = (
    *("cputrain", "torch", "torchvision", "numpy", "pillow", "pydantic", "click", "rich", "psutil", "safetensors"),
    *("timm", "oneccl-devel", "impi-rt", "turbojpeg", "intel-openmp", "mpi4py", "intel-extension-for-pytorch"),
)


def facts(probe: Mapping[str, Mapping[str, Any]], checks: tuple[Check, ...], env: Mapping[str, str]) -> dict[str, Any]:
    """Return what affects trainings on this host and this Python; `checks` are those of the imports."""
    kib = _meminfo(Path("/"))
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


def facts_text(found: Mapping[str, Any]) -> str:
    """Format the facts in blocks of aligned lines."""
    blocks = []
    for title, values in found.items():
        if isinstance(values, Mapping):
            rows = [(f"  {name}", _cell(name, value)) for name, value in values.items() if value is not None]
        else:
            rows = [("  -", value) for value in values]
        blocks.append(f"{title}\n{align_columns(rows) if rows else '  none'}")
    return "\n".join(blocks)


def _cell(name: str, value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {each}" for key, each in value.items() if each is not None)
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
        found = find_runtime(target_of(()), env)
    except InputError as refused:
        return {"openmp": str(refused)}
    return {"openmp": f"{found.openmp}: {found.origin}", "allocator": found.allocator}


def _os_name() -> str:
    try:
        return platform.freedesktop_os_release()["PRETTY_NAME"]
    except OSError:  # no os-release
        return platform.system()


CPU_INDEX = "--index-url https://download.pytorch.org/whl/cpu"  # PyTorch's own index of CPU builds
CACHE_BYTES = 4 * MIB  # oneCCL's compiled backend has 1 MiB, and needs as much again while compiling
NATIVE_PARTS = (ONECCL := "oneCCL", "native kernels", "fast decoder")
Probed = Mapping[str, Mapping[str, Any]]


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
    found = f"{torch['version']} ({build}, {torch['capability']}), imported in {torch['import_s']:g} s"
    if not torch["onednn"]:
        return error("torch", f"{found}, without oneDNN", f"pip install --force-reinstall '{requirement}' {CPU_INDEX}")
    return ok("torch", found)


def torchvision_check(torchvision: Mapping[str, Any], torch: Mapping[str, Any]) -> Check:
    """Check whether torchvision can be imported with this torch."""
    if "error" not in torchvision:
        return ok("torchvision", str(torchvision["version"]))
    if "error" in torch and not torch.get("late"):
        return error("torchvision", "not tried, as torch cannot be imported", "repair torch first")
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


def compiler_check(found: str | None) -> Check:
    """Check the compiler of the native parts."""
    if found is None:
        return warning("C++ compiler", "none: no oneCCL, no native kernels", "apt install g++, or module load gcc")
    return ok("C++ compiler", found)


def cache_check(env: Mapping[str, str], compiled: Mapping[str, object]) -> Check:
    """Check the cache of compiled code by writing to it; `compiled` maps NATIVE_PARTS to whether they can be loaded."""
    lacking = ", ".join(f"no {name}" for name in NATIVE_PARTS if not compiled.get(name))
    try:
        folder = cache_folder(env)
    except RunError as refused:
        found, _, remedy = str(refused).partition(": ")
        return warning("cache", f"{found}: {lacking}", remedy)
    try:
        try_cache(folder, CACHE_BYTES)
    except OSError as refused:
        found = f"{folder}: {cause(refused, folder)}: "
        if not lacking:
            return ok("cache", f"{found}contains all native parts, but measurements cannot be saved")
        remedy = "set CPUTRAIN_CACHE to a writable folder that allows execution"
        return warning("cache", found + lacking, remedy)
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


def oneccl_check(found: Mapping[str, Any], cache: Check) -> Check:
    """Check oneCCL and the MPI that it loads; `cache` is the check of the folder for its compiled backend."""
    if "error" in found:
        why = str(found["error"]).partition("comm.backend=ccl: ")[2] or str(found["error"])
        return warning("oneCCL", f"gloo communicates: {why}", 'pip install "cputrain[ccl]"')
    if not found["compiled"] and cache.status != OK:
        why = f"{found['version']} is not compiled, and there is no usable cache"
        return warning("oneCCL", f"gloo communicates: {why}", cache.remedy)
    compiled = "compiled" if found["compiled"] else "not compiled yet: run cputrain doctor ccl"
    return ok("oneCCL", f"{found['version']} ({found['library']}), {compiled}")


def launcher_check(found: Mapping[str, Any]) -> Check:
    """Check the launcher for several hosts."""
    if "error" in found:
        why = str(found["error"]).removeprefix("InputError: ")
        return warning("launcher", why, "needed only for several hosts: module load an MPI, or work inside Slurm")
    return ok("launcher", " ".join(filter(None, (found["name"], found["version"], found["program"]))))


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
        found = f"not bound as planned: pid {', '.join(differing[:8])}"
        return error("bound processes", found, "see cputrain doctor affinity")
    running = len(processes)
    return ok("bound processes", f"{running} as planned" if running else "none is running")


def job_check(env: Mapping[str, str]) -> Iterator[Check]:
    """Check the scheduler's job around this process, if any, and whether its hosts are known."""
    try:
        found = allocation(env)
    except InputError as refused:
        yield error("job", str(refused), "name the hosts with --hosts")
        return
    if found is None:
        return
    if found.alone:
        yield ok("job", found.title)
    elif not found.hosts:
        yield warning("job", f"{found.title}: its hosts are not known", f"name them with {found.scheduler.give}")
    elif found.note:
        yield warning("job", f"{found.title}: {fold([host.name for host in found.hosts])}", found.note)
    else:
        yield ok("job", f"{found.title}: {fold([host.name for host in found.hosts])}")


def installed(package: str) -> str:
    """Return a package with its version."""
    return f"{package} {installed_version(package) or f'(not installed in {sys.prefix})'}"


def required(package: str, *, by: str) -> str:
    """Return what a package requires of another, such as 'torch>=2.8', or its bare name if it requires nothing."""
    try:
        listed = metadata.requires(by) or []
    except metadata.PackageNotFoundError:
        listed = []
    return next((each for each in listed if re.match(rf"{package}\b(?!-)", each)), package)


Found = dict[str, Any]
Env = Mapping[str, str]


def _launcher(env: Env) -> Found:
    """Find the launcher on PATH, with its version."""
    from cputrain.mpi.launchers.command import find_launcher

    found = find_launcher("auto", env)
    return {"name": found.launcher.name, "version": ".".join(map(str, found.version)), "program": found.program}


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
    from cputrain.comm.ccl.environment import built_path, find_libraries
    from cputrain.native_build import is_usable

    found = find_libraries(env)
    built = None
    with suppress(RunError):  # no cache folder
        built = built_path(found, env)
    return {
        "version": ".".join(map(str, found.version)),
        "library": str(found.ccl),
        "mpi": str(found.mpi),
        "fabric": str(found.fabric),
        "compiled": str(built) if built and is_usable(built) else None,
    }


def _native(env: Env) -> Found:
    """Check whether the other native parts are compiled in the cache and can be loaded from there."""
    from cputrain.affinity.errors import RunError
    from cputrain.data import pixels
    from cputrain.kernels import batchnorm
    from cputrain.native_build import is_usable

    found: Found = {}
    with suppress(RunError):  # no cache folder
        found["native kernels"] = is_usable(batchnorm.built_path(env))
        found["fast decoder"] = is_usable(pixels.built_path(env))
    return found


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
            found = part(env)
        except (Exception, SystemExit) as error:  # noqa: BLE001
            found = {"error": f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"}
        os.write(1, json.dumps({name: found}).encode() + b"\n")


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


def probed(process: "subprocess.Popen[bytes]", timeout_s: float) -> dict[str, Found]:
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
    found: dict[str, Found] = {}
    for line in out.splitlines():
        with suppress(ValueError):  # not JSON: printed by an import
            value = json.loads(line)
            found |= value if isinstance(value, dict) else {}
    missing = [name for name in PARTS if name not in found]
    for name in missing:
        found[name] = {"error": why if late or name == missing[0] else f"not reached: {why}", "late": late}
    return found


if __name__ == "__main__":
    use_utf8()
    main(os.environ)
