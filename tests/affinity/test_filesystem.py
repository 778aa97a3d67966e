"""File systems that refuse to write: read-only, full, a file in place of a folder. Each error is one line."""

import errno
import json
import os
import pwd
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from cputrain.affinity.errors import InputError
from cputrain.affinity.filesystem import cache_folder, check_writable, filesystem_refusal, mount_of
from tests.support.commands import PYTHON, here, mpi_path, refused
from tests.support.forked import Ended, ended, forked
from tests.support.images import write_images

CPUTRAIN = f"{PYTHON} -m cputrain"
TRAIN = "train imagefolder data.path=images batch.local=3 plan.ppn=1 epochs=1 schedule.warmup_epochs=0"
LENET = "model.name=lenet model.zero_gamma=none data.crop=28"
IN_TMPFS = """
import ctypes, os, subprocess, sys, tempfile
from tests.support.fork_server import become, fork_ranks
first, last, *words = sys.argv[1:]
assert ctypes.CDLL(None).unshare(0x00020000) == 0, "CLONE_NEWNS"
subprocess.run(["sh", "-c", "mount --make-rprivate / && " + first], check=True)
fork_ranks()
tempfile.tempdir = None  # read TMPDIR again
try:
    become(words, dict(os.environ))
finally:
    subprocess.run(["sh", "-c", last])
"""


@pytest.fixture
def place(tmp_path: Path) -> Path:
    write_images(tmp_path / "images", train=4, val=3)
    (tmp_path / "out").mkdir()
    return tmp_path


def in_tmpfs(place: Path, options: str, *commands: str) -> list[tuple[int, str]]:
    """Status and stderr of commands that each find a tmpfs of their own at out/."""
    mount = mounting(options)
    found = []
    for command in commands:
        script = f"{mount} && exec {command}"
        done = subprocess.run(["unshare", "-m", "sh", "-c", script], cwd=place, capture_output=True, text=True)
        found.append((done.returncode, done.stderr))
    return found


def mounting(options: str) -> str:
    """The command that mounts a tmpfs at out/."""
    if os.geteuid() != 0:
        pytest.skip(reason="needs root, to mount a file system")
    return f"mount -t tmpfs -o {options} none out"


def forked_in_tmpfs(
    place: Path, options: str, *words: str, first: str = "true", last: str = "true", **env: str
) -> Ended:
    """The end of `python WORDS`, forked, with a tmpfs of its own at out/, and shell commands before and after it."""
    script = f"{mounting(options)} && {first}"
    with forked("-c", IN_TMPFS, script, last, *words, cwd=place, **env) as process:
        return ended(process)


def train_in_tmpfs(place: Path, options: str, settings: str, **given: str) -> Ended:
    words = (*TRAIN.split(), "plan.threads=1", *settings.split())
    return forked_in_tmpfs(place, options, "-m", "cputrain", *words, **given)


def test_a_read_only_folder_is_refused_before_anything_is_done(place: Path) -> None:
    commands = {
        "output": f"{TRAIN} output=out/run",
        "--output": "launch --output out/run -- true",
        "--write": "plan --write out/run",
        "OUT": "prepare imagefolder images out/run",
    }
    for option, words in commands.items():
        end = forked_in_tmpfs(place, "ro", "-m", "cputrain", *words.split())
        message = f"{place}/out is not writable; change its permissions, or name another folder"
        assert (end.status, end.err) == (2, f"cputrain: {option} out/run: {message}\n")
    end = forked_in_tmpfs(place, "ro", "-m", "cputrain", "data", "show", "images", "--output", "out/sheet.png")
    said = "cputrain: out/sheet.png: Read-only file system: change its permissions, or name another folder\n"
    assert (end.status, end.err) == (1, said)


def test_a_disk_without_room_for_a_checkpoint_is_refused_before_the_first_step(place: Path) -> None:
    """LeNet's weights have 1.7 MB, its momentum as much. One that is full at once has no room for the run's first
    files."""
    small = f"{LENET} engine=eager output=out/run"
    end = train_in_tmpfs(place, "size=2500k", small, last="echo events: $(cat out/run/events.jsonl) >&2")
    assert "MB free, a checkpoint needs 3.4 or more: " in end.err, end.err
    assert end.status == 2 and end.err.splitlines()[-1].strip() == "events:"
    end = train_in_tmpfs(place, "size=300k", small, first="head -c 9M /dev/zero > out/ballast; true")
    assert end.status == 2 and "No space left on device" in end.err.splitlines()[-1], end.err


def test_a_disk_that_is_full_at_a_checkpoint_is_named_by_the_rank_that_found_it(place: Path) -> None:
    settings = f"{LENET} plan.ppn=2 engine=eager comm.backend=gloo checkpoint.every_steps=1 output=out/run"
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip(reason="needs two cores")
    end = train_in_tmpfs(place, "size=5m", settings)
    lines = end.err.splitlines()
    unfinished = "out/run/checkpoints/step-0000002"
    full = f"cputrain: {unfinished}/{{}}.safetensors: No space left on device: free some space, or name another folder"
    assert {full.format(name) for name in ("model", "optimizer")} & {*lines} and end.status == 1, end.err
    assert "Traceback" not in end.err and "cputrain: rank 0 on " in end.err


def test_where_nothing_can_be_compiled_a_training_goes_on_without(place: Path) -> None:
    """As on compute nodes that see homes read-only. Asked for by name it is refused."""
    settings = (f"{LENET} max_steps=1 output=run", f"{LENET} output=other comm.backend=ccl")
    auto, named = (train_in_tmpfs(place, "ro", each, CPUTRAIN_CACHE="out/cache") for each in settings)
    assert auto.status == 0, auto.err
    environment = json.loads((place / "run/environment.json").read_text())
    assert environment["backend"] == "gloo" and environment["decoder"].startswith("Pillow: "), environment
    why = f"Read-only file system (mount {place}/out); set CPUTRAIN_CACHE to a writable folder"
    assert why in environment["backend_why"]
    assert named.status == 1 and "Traceback" not in named.err
    assert " into out/cache/ccl-torch" in named.err
    assert "or set comm.backend=gloo" in named.err


COMPILES = """
import os, sys
from pathlib import Path
from cputrain.affinity.errors import RunError
from cputrain.native_build import NativeExtension, ensure_compiled, loading
import ctypes
def argv(cxx, output):
    return (cxx, "-shared", "-fPIC", "source.cpp", "-o", str(output))
part = NativeExtension(title="the part", requested_by="part=fast", alternative="set part=slow", argv=argv)
try:
    path = ensure_compiled(part, Path("out/cache/part.so"), os.environ)
    with loading(path, part.requested_by, part.alternative):
        print(ctypes.CDLL(str(path)).answer())
except RunError as error:
    sys.exit(str(error))
"""
WHERE = "part=fast: cannot {} out/cache: {}; set CPUTRAIN_CACHE to a "


@pytest.fixture
def part(place: Path) -> str:
    """A command that compiles a function, loads it and prints 42."""
    (place / "source.cpp").write_text(
        'extern "C" int answer() { return 42; }\n' + "static const char data[9999] = {1};\n"
    )
    (place / "compiles.py").write_text(COMPILES)
    return f"{PYTHON} {place}/compiles.py"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            "noexec",
            (
                "load the part from",
                "the mount {}/out does not allow execution (noexec)",
                "folder on another file system",
            ),
        ),
        ("ro", ("compile the part into", "Read-only file system (mount {}/out)", "writable folder")),
        (
            "size=8k",
            ("compile the part into", "No space left on device (mount {}/out)", "writable folder with free space"),
        ),
        (
            "nr_inodes=2",
            ("compile the part into", "No space left on device (mount {}/out)", "writable folder with free space"),
        ),
    ],
)
def test_a_cache_that_cannot_be_used_is_told_with_what_to_do(
    place: Path, part: str, options: str, said: tuple[str, str, str]
) -> None:
    """Each with a real mount, before time is spent on compiling where that can be known."""
    ((status, err),) = in_tmpfs(place, options, part)
    where = WHERE.format(said[0], said[1].format(place)) + said[2] + ", or set part=slow"
    assert (status, err.strip().splitlines()[-1]) == (1, where), err


def test_nothing_is_left_in_a_cache_that_has_no_room(place: Path, part: str) -> None:
    script = shlex.quote(f"{part}; find out -type f >&2; echo end >&2")
    ((_, err),) = in_tmpfs(place, "size=8k", f"sh -c {script}")
    assert err.endswith("or set part=slow\nend\n"), err


def test_a_compiled_file_that_is_damaged_is_compiled_anew(place: Path, part: str) -> None:
    """An empty file, one cut short, one with another byte in its middle; one that is whole is used as it is."""

    def answered() -> str:
        done = subprocess.run(shlex.split(part), cwd=place, capture_output=True, text=True)
        assert done.stdout == "42\n", done.stderr
        return done.stderr

    assert "compiling the part" in answered() and answered() == ""
    file = place / "out/cache/part.so"
    data = file.read_bytes()
    middle = len(data) // 2
    for damaged in (b"", b"\x7fELF", data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :]):
        file.write_bytes(damaged)
        assert f"{file.relative_to(place)} is damaged and is compiled again" in answered() and answered() == ""
    file.with_suffix(".sha256").write_bytes(b"\xff\x00")  # no text
    assert "compiling the part" in answered() and answered() == ""
    file.with_suffix(".sha256").unlink()
    assert "compiling the part" in answered() and answered() == ""
    assert {path.name for path in file.parent.iterdir()} == {"part.so", "part.sha256"}


def test_a_full_or_absent_folder_of_temporary_files_does_not_matter_to_compiling(place: Path, part: str) -> None:
    script = f"dd if=/dev/zero of=out/fill bs=1k count=64 2> /dev/null; exec {part}"
    (place / "compiles.py").write_text(COMPILES.replace("out/cache", "cache"))
    ((status, err),) = in_tmpfs(place, "size=16k", f"env TMPDIR={place}/out sh -c {shlex.quote(script)}")
    assert status == 0, err


@pytest.mark.parametrize(
    ("env", "folder"),
    [
        ({"CPUTRAIN_CACHE": "/c", "XDG_CACHE_HOME": "/x", "HOME": "/h"}, "/c"),
        ({"CPUTRAIN_CACHE": "", "XDG_CACHE_HOME": "/x", "HOME": "/h"}, "/x/cputrain"),
        ({"CPUTRAIN_CACHE": "~/c", "XDG_CACHE_HOME": "/x", "HOME": "/h"}, "/h/c"),  # quoted, or in a container's ENV
        ({"CPUTRAIN_CACHE": "", "XDG_CACHE_HOME": "", "HOME": "/h"}, "/h/.cache/cputrain"),
        ({"XDG_CACHE_HOME": "relative", "HOME": "/h"}, "/h/.cache/cputrain"),  # the specification has it ignored
        ({"HOME": ""}, f"{pwd.getpwuid(os.getuid()).pw_dir}/.cache/cputrain"),
    ],
)
def test_an_empty_variable_of_the_cache_counts_as_unset_and_a_tilde_as_home(env: dict[str, str], folder: str) -> None:
    assert cache_folder(env) == Path(folder)


def test_doctor_tries_the_cache_that_it_calls_in_order(place: Path) -> None:
    check = "import os, sys; from cputrain.doctor import cache_check; c = cache_check(os.environ, {})"
    code = f"{check}; print(c.status, c.found, c.remedy, file=sys.stderr)"
    for options, start in {
        "size=8m": f"ok {place}/out/cache ",
        "noexec": f"warning {place}/out/cache: the mount {place}/out does not allow execution (noexec): no oneCCL",
        "ro": f"warning {place}/out/cache: Read-only file system (mount {place}/out): no oneCCL",
        "size=1m": f"warning {place}/out/cache: No space left on device (mount {place}/out): no oneCCL",
    }.items():
        err = forked_in_tmpfs(place, options, "-c", code, CPUTRAIN_CACHE=f"{place}/out/cache").err
        assert err.startswith(start) and ("CPUTRAIN_CACHE" in err.partition(" no oneCCL")[2]) == (options != "size=8m")
    homeless = "env -u HOME setpriv --reuid 54321 --clear-groups"
    if shutil.which("setpriv") is not None:
        place.chmod(0o755)
        found = subprocess.run(
            [*homeless.split(), sys.executable, "-c", code], cwd="/", capture_output=True, text=True, env={}
        )
        start = "warning user 54321 has no home directory for the cache: no oneCCL"
        assert found.stderr.startswith(start), found.stderr
        assert found.stderr.endswith(" set CPUTRAIN_CACHE to a folder\n")


FILLED = """
import os, subprocess, sys
from cputrain.data import pixels
from cputrain.doctor import PARTS, cache_check
from cputrain.native_build import _checksum, checksum_file
place = pixels.decoder_path(os.environ)
place.parent.mkdir(parents=True)
place.write_bytes(bytes(99))
checksum_file(place).write_text(_checksum(place))
for options, oneccl in (("ro", True), ("ro", False), ("ro,noexec", True)):
    subprocess.run(["mount", "-o", f"remount,{options}", "out"], check=True)
    check = cache_check(os.environ, {**PARTS["native"](os.environ), "oneCCL": oneccl, "native kernels": True})
    print(check.status, check.found, file=sys.stderr)
"""


def test_a_cache_that_may_only_be_read_serves_what_lies_compiled_there(place: Path) -> None:
    """Doctor's line names what is not there; on a mount that executes nothing, a compiled file counts as absent."""
    end = forked_in_tmpfs(place, "size=8m", "-c", FILLED, CPUTRAIN_CACHE=f"{place}/out/cache")
    found = f"{place}/out/cache: Read-only file system (mount {place}/out)"
    assert (end.status, end.err.splitlines()) == (
        0,
        [
            f"ok {found}: contains all native parts, but measurements cannot be saved",
            f"warning {found}: no oneCCL",
            f"warning {found}: no fast decoder",
        ],
    )


def test_a_file_in_the_way_and_other_errors(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for folder in (tmp_path / "file", tmp_path / "file/a/b"):
        with pytest.raises(InputError, match=f"--write {folder}: {tmp_path}/file is a file; name a folder"):
            check_writable(folder, "--write")
    check_writable(tmp_path / "a/b/c", "--write")
    assert filesystem_refusal(OSError(errno.EDQUOT, "Disk quota exceeded", "x.pt")) == (
        "x.pt: Disk quota exceeded: free some space, or name another folder"
    )
    assert filesystem_refusal(OSError(errno.ENOSPC, "No space left on device")) is not None
    assert filesystem_refusal(FileNotFoundError(errno.ENOENT, "No such file or directory", "x")) is None
    assert filesystem_refusal(PermissionError(errno.EPERM, "Operation not permitted")) is None, (
        "of sched_setaffinity, say"
    )


def test_folders_are_made_where_they_can_be_and_never_directly_under_the_root(place: Path) -> None:
    proc, top = "cannot create a folder in /proc (", "/cputrain-nowhere does not exist; create it first"
    if os.geteuid() != 0:
        proc = top = "is not writable"
    for output, why in {"/proc/x": proc, "/cputrain-nowhere/a": top}.items():
        message = refused(here(*TRAIN.split(), f"output={output}", cwd=place))
        assert message.startswith(f"cputrain: output {output}: ") and why in message
    assert not Path("/cputrain-nowhere").exists()
    check_writable(place / "new/folders/inside", "output")
    assert not (place / "new").exists() and not list(place.glob(".cputrain-*"))


def test_a_file_in_place_of_a_folder_and_a_folder_in_place_of_a_file_are_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for act in ((tmp_path / "file").mkdir, (tmp_path / "file/below").mkdir, tmp_path.read_bytes):
        with pytest.raises(OSError, match=str(tmp_path)) as error:
            act()
        said = filesystem_refusal(error.value)
        assert said is not None and said.startswith(f"{tmp_path}")
        assert said.endswith(": move the existing file, or name another folder")


def test_an_existing_folder_that_only_refuses_when_it_is_written_to_is_found_beforehand(tmp_path: Path) -> None:
    """As a server's that does not trust root (root_squash): access(2) answers that it may be written to."""
    if os.geteuid() != 0:
        pytest.skip(reason="needs root: /proc may be written to, as access(2) answers, but is not")
    for folder in ("/proc", "/sys/kernel"):
        assert os.access(folder, os.W_OK)
        with pytest.raises(InputError, match=f"output {folder}: cannot create a folder in {folder} .*; name another"):
            check_writable(Path(folder), "output")


def test_no_folder_for_temporary_files_is_one_line(place: Path) -> None:
    """tempfile tries TMPDIR, /tmp, /var/tmp, /usr/tmp and the working folder."""
    code = "import sys, tempfile\nfrom cputrain.affinity.terminal import exit_status\ntry:\n    tempfile.mkdtemp()\n"
    code += "except OSError as error:\n    sys.exit(exit_status(error, 'cputrain'))"
    # Read-only and not hidden: the tests themselves may be below /tmp.
    read_only = "mount --rbind {0} {0} && mount -o remount,ro,bind {0}"
    script = " && ".join(map(read_only.format, ("/var/tmp", "/tmp")))
    if os.geteuid() != 0:
        pytest.skip(reason="needs root, to mount a file system")
    run = f"{script} && cd /proc && exec env TMPDIR=/proc {PYTHON} -c {shlex.quote(code)}"
    done = subprocess.run(["unshare", "-m", "sh", "-c", run], cwd=place, capture_output=True, text=True)
    assert done.returncode == 1 and done.stderr.startswith(
        "cputrain: No usable temporary directory found in ['/proc', "
    )
    assert done.stderr.endswith(": free some space there, or set TMPDIR to a writable folder\n")


def test_where_scripts_are_not_executed_the_shell_is_named(place: Path) -> None:
    plan = f"env PATH={mpi_path('mpich')['PATH']} {CPUTRAIN} plan --launcher mpich --write out/p"
    for options, start in {"noexec": "sh out/p/launch.sh CMD", "size=1m": "out/p/launch.sh CMD"}.items():
        ((status, err),) = in_tmpfs(place, options, f"sh -c {shlex.quote(f'{plan} >&2')}")
        assert status == 0 and f"; start with {start}" in err, err


def test_torch_compile_is_refused_where_its_code_cannot_be_loaded(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = "import os, sys; from cputrain.training.engine import choose_engine\ntry:\n"
    code += "    choose_engine('compile', 'float32', os.environ)\nexcept Exception as error:\n    sys.exit(str(error))"
    refused = f"engine=compile cannot use the cache directory {place}/out, the mount {place}/out does not allow "
    refused += "execution (noexec): set TORCHINDUCTOR_CACHE_DIR to another directory, or set engine=eager\n"
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)  # which torch sets in a process that has compiled
    for options, name, expected in (
        ("noexec", "TMPDIR", (1, refused)),
        ("noexec", "TORCHINDUCTOR_CACHE_DIR", (1, refused)),
        ("size=1m", "TMPDIR", (0, "")),
    ):
        end = forked_in_tmpfs(place, options, "-c", code, **{name: f"{place}/out"})
        assert (end.status, end.err) == expected


def test_the_mount_of_a_file_is_found_also_where_its_name_has_blanks(place: Path) -> None:
    code = "import sys; from pathlib import Path; from cputrain.affinity.filesystem import mount_of; "
    code += "print(mount_of(Path('out/a b/c/d')), file=sys.stderr)"
    script = f"mkdir 'out/a b' && mount -t tmpfs none 'out/a b' && {PYTHON} -c {shlex.quote(code)}"
    ((_, err),) = in_tmpfs(place, "size=1m", f"sh -c {shlex.quote(script)}")
    assert err == f"{place}/out/a b\n" and mount_of(Path("/proc/self/status")) == Path("/proc")
