"""Boot a Debian kernel under qemu, without KVM, on this host's files, and run one command in the guest."""

import lzma
import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from dataclasses import dataclass
from pathlib import Path

from tests.lab.qemu import MADT, kernel_arguments, machine_arguments, madt
from tests.lab.topologies import Topology

ROOT = Path(__file__).parents[2]
KERNELS = ROOT / ".lab"  # a folder for each kernel, as `make kernels` unpacks its package
BYTECODE = KERNELS / "bytecode"  # compiled modules: a guest compiles fifty times as long, and can store none
QEMU = "qemu-system-x86_64"
PROGRAMS = (
    *(QEMU, "busybox", "cpio", "modprobe", "depmod"),
    *("lscpu", "numactl", "migratepages", "taskset", "lstopo-no-graphics"),
)
MODULES = ("virtio_pci", "9pnet_virtio", "9p", "virtio_net")
# no_timer_check: under emulation the kernel's test of its timer fails now and then, which is a panic.
WORDS = ("console=ttyS0", "quiet", "panic=-1", "mitigations=off", "init_on_alloc=0", "no_timer_check")
PANIC = ("Kernel panic", "Oops:", "BUG:", "rcu_sched detected stalls")
BOOTS = 6  # of a guest, at most: a panic takes seconds
TIMEOUT_S = 1800.0  # a guest takes a minute or two of two idle cores, and a busy host has less for it
LAST_LINES = 15


@dataclass(frozen=True, slots=True, kw_only=True)
class Guest:
    """What to boot: a topology, a kernel's folder under KERNELS, a shell command that runs as root, more of qemu's
    arguments. `exchange` is a folder that the guest has as /mnt; guests of different names may share one."""

    topology: Topology
    kernel: str
    command: str
    exchange: Path
    name: str = "guest"
    more: tuple[str, ...] = ()

    @property
    def status(self) -> Path:
        """The file with the command's exit status, once it has ended."""
        return self.exchange / f"status-{self.name}"

    @property
    def console(self) -> Path:
        """What the guest prints."""
        return self.exchange / f"console-{self.name}"


def missing(kernels: tuple[str, ...]) -> str | None:
    """What the lab needs and this host lacks; None where it has all."""
    lacking = [program for program in PROGRAMS if find(program) is None]
    lacking += [f"kernel {name} (make kernels)" for name in kernels if not [*(KERNELS / name).glob("boot/vmlinuz-*")]]
    return f"the lab needs {', '.join(lacking)}: see docs/contributing/lab.md" if lacking else None


def find(program: str) -> str | None:
    """A program's path; administrators' programs are not on everybody's PATH."""
    return shutil.which(program, path=f"{os.environ['PATH']}:/usr/sbin:/sbin")


def compile_modules(*names: str) -> None:
    """Compile modules of this Python, and all that they import, for the guests."""
    env = {**os.environ, "PYTHONPYCACHEPREFIX": str(BYTECODE)}
    env.pop("PYTHONDONTWRITEBYTECODE", None)
    subprocess.run([sys.executable, "-c", f"import {', '.join(names)}"], env=env, cwd=ROOT, check=True)


def run(guest: Guest) -> str:
    """Boot, run the command, return what the guest printed; a boot that panics, as emulation makes one in twelve do,
    is tried again. Raises RuntimeError where the command did not end with status 0."""
    for _ in range(BOOTS):
        output = _boot(guest)
        if guest.status.is_file() or not any(sign in output for sign in PANIC):
            break
    if not guest.status.is_file() or guest.status.read_text().strip() != "0":
        last = "\n".join(output.splitlines()[-LAST_LINES:])
        raise RuntimeError(f"the guest's command failed or did not end:\n{last}")
    return output


def _boot(guest: Guest) -> str:
    """The guest's console, as text. It lasts until the guest powers off, or TIMEOUT_S."""
    # Commands start Python with -S, as reading every .pth file takes the guest long: packages are found by this path.
    variables = {"PYTHONPYCACHEPREFIX": str(BYTECODE), "PYTHONPATH": sysconfig.get_path("platlib")}
    exports = " ".join(f"{name}={shlex.quote(value)}" for name, value in variables.items())
    (guest.exchange / f"command-{guest.name}").write_text(
        f"cd {shlex.quote(str(ROOT))}; export {exports}\n{guest.command}\n"
    )
    guest.status.unlink(missing_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        boot = KERNELS / guest.kernel / "boot"
        kernel = next(boot.glob("vmlinuz-*"))
        (Path(folder) / MADT).write_bytes(madt(guest.topology))
        initrd = _initrd(kernel, Path(folder))
        words = (*WORDS, f"LAB_GUEST={guest.name}", *kernel_arguments(guest.topology))  # init finds it as a variable
        argv = [
            QEMU,
            *machine_arguments(guest.topology, Path(folder)),
            *("-nodefaults", "-display", "none", "-no-reboot", "-serial", f"file:{guest.console}"),
            *("-kernel", str(kernel), "-initrd", str(initrd), "-append", " ".join(words)),
            *("-virtfs", "local,path=/,mount_tag=host,security_model=none,readonly=on,multidevs=remap"),
            *("-virtfs", f"local,path={guest.exchange},mount_tag=exchange,security_model=none"),
            *guest.more,
        ]
        _run_qemu(argv)
    return guest.console.read_text(errors="replace").replace("\r", "")


def _run_qemu(argv: list[str]) -> None:
    """Until the guest has powered off. Raises RuntimeError after TIMEOUT_S, and where qemu refuses its arguments."""
    try:
        ended = subprocess.run(argv, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"the guest has not ended after {TIMEOUT_S:.0f} s: {argv}") from None
    if ended.returncode != 0:
        raise RuntimeError(f"qemu failed: {ended.stderr[-500:]}: {argv}")


def _initrd(kernel: Path, folder: Path) -> Path:
    """The first file system: busybox, the drivers of the shared folders and the network, init.sh."""
    tree = folder / "tree"
    for name in ("bin", "dev", "proc", "sys", "host", "modules"):
        (tree / name).mkdir(parents=True)
    shutil.copy(find("busybox") or "", tree / "bin/busybox")
    shutil.copy(Path(__file__).with_name("init.sh"), tree / "init")
    (tree / "init").chmod(0o755)
    files = _module_files(kernel)
    for file in files:
        packed = file.read_bytes()
        (tree / "modules" / _bare(file)).write_bytes(lzma.decompress(packed) if file.suffix == ".xz" else packed)
    (tree / "modules/order").write_text("".join(f"{_bare(file)}\n" for file in files))
    archive = folder / "initrd"
    names = "\n".join(str(path.relative_to(tree)) for path in sorted(tree.rglob("*")))
    with archive.open("wb") as out:
        subprocess.run(["cpio", "-o", "-H", "newc", "--quiet"], cwd=tree, input=names.encode(), stdout=out, check=True)
    return archive


def _module_files(kernel: Path) -> list[Path]:
    """The modules' files in the order in which they load; each once."""
    root, version = kernel.parents[1], kernel.name.removeprefix("vmlinuz-")
    if not (root / f"lib/modules/{version}/modules.dep").is_file():
        subprocess.run([find("depmod") or "", "-b", root, version], check=True)
    query = [find("modprobe") or "", "-d", str(root), "-S", version, "--show-depends"]
    listed = [subprocess.run([*query, name], capture_output=True, text=True, check=True).stdout for name in MODULES]
    lines = dict.fromkeys(line for text in listed for line in text.splitlines() if line.startswith("insmod "))
    return [Path(line.split()[1]) for line in lines]


def _bare(file: Path) -> str:
    return file.name.removesuffix(".xz")
