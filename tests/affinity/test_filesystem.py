"""File systems that refuse to write: read-only, full, a file in place of a folder. Each error is one line."""

import errno
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from affinity.errors import InputError
from affinity.filesystem import check_writable, refusal
from tests.support.commands import cputrain, refused
from tests.support.images import write_images

CPUTRAIN = f"{sys.executable} -m cputrain"
TRAIN = "train imagefolder data.path=images data.crop=32 batch.local=3 plan.ppn=1 epochs=1 schedule.warmup_epochs=0"


@pytest.fixture
def place(tmp_path: Path) -> Path:
    write_images(tmp_path / "images", train=4, val=3)
    (tmp_path / "out").mkdir()
    return tmp_path


def in_tmpfs(place: Path, options: str, *commands: str) -> list[tuple[int, str]]:
    """Status and stderr of commands that each find a tmpfs of their own at out/."""
    mount = f"mount -t tmpfs -o {options} none out"
    if os.geteuid() != 0:
        pytest.skip(reason="needs root, to mount a file system")
    ended = []
    for command in commands:
        script = f"{mount} && exec {command}"
        done = subprocess.run(["unshare", "-m", "sh", "-c", script], cwd=place, capture_output=True, text=True)
        ended.append((done.returncode, done.stderr))
    return ended


def test_a_read_only_folder_is_refused_before_anything_is_done(place: Path) -> None:
    commands = {
        "output": f"{CPUTRAIN} {TRAIN} output=out/run",
        "--output": f"{CPUTRAIN} launch --output out/run -- true",
        "--write": f"{CPUTRAIN} plan --write out/run",
        "OUT": f"{CPUTRAIN} prepare imagefolder images out/run",
    }
    for option, ended in zip(commands, in_tmpfs(place, "ro", *commands.values()), strict=True):
        message = f"{place}/out is not writable: change its permissions, or name another folder"
        assert ended == (2, f"cputrain: {option} out/run: {message}\n")
    ((status, err),) = in_tmpfs(place, "ro", f"{CPUTRAIN} data show images --output out/sheet.png")
    assert status == 1
    assert err == "cputrain: out/sheet.png: Read-only file system: change its permissions, or name another folder\n"


def test_a_disk_that_is_full_at_a_checkpoint_is_named_by_the_rank_that_found_it(place: Path) -> None:
    settings = "model.name=resnet18 comm.backend=gloo output=out/run"
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip(reason="needs two cores")
    script = shlex.quote(f"{CPUTRAIN} {TRAIN} plan.ppn=2 {settings}; echo $? $(ls -A out/run/checkpoints) >&2")
    ((_, err),) = in_tmpfs(place, "size=60m", f"sh -c {script}")
    lines = err.splitlines()
    unfinished = "out/run/checkpoints/.step-0000002.partial"
    full = f"cputrain: {unfinished}/{{}}.safetensors: No space left on device: free some space, or name another folder"
    assert {full.format(name) for name in ("model", "optimizer")} & {*lines} and lines[-1].split()[0] == "1", err
    assert "Traceback" not in err and "cputrain: rank 0 on " in err


def test_where_nothing_can_be_compiled_a_training_goes_on_without(place: Path) -> None:
    """As on compute nodes that see homes read-only. Asked for by name it is refused."""
    cache = f"env CPUTRAIN_CACHE=out/cache {CPUTRAIN} {TRAIN}"
    lenet = "model.name=lenet model.zero_gamma=none data.crop=28 max_steps=1"
    commands = (f"{cache} {lenet} output=run", f"{cache} {lenet} output=other comm.backend=ccl")
    (auto, err), (named, refusal_of_ccl) = in_tmpfs(place, "ro", *commands)
    assert auto == 0, err
    environment = json.loads((place / "run/environment.json").read_text())
    assert environment["backend"] == "gloo" and environment["decoder"].startswith("Pillow: "), environment
    assert "Read-only file system: set CPUTRAIN_CACHE to a folder that may be" in environment["backend_why"]
    assert named == 1 and "Traceback" not in refusal_of_ccl
    assert "cannot be compiled into out/cache/ccl-torch" in refusal_of_ccl
    assert "or set comm.backend=gloo" in refusal_of_ccl


def test_a_file_in_the_way_and_other_errors(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for folder in (tmp_path / "file", tmp_path / "file/a/b"):
        with pytest.raises(InputError, match=f"--write {folder}: {tmp_path}/file is a file: name a folder"):
            check_writable(folder, "--write")
    check_writable(tmp_path / "a/b/c", "--write")
    assert refusal(OSError(errno.EDQUOT, "Disk quota exceeded", "x.pt")) == (
        "x.pt: Disk quota exceeded: free some space, or name another folder"
    )
    assert refusal(OSError(errno.ENOSPC, "No space left on device")) is not None
    assert refusal(FileNotFoundError(errno.ENOENT, "No such file or directory", "x")) is None
    assert refusal(PermissionError(errno.EPERM, "Operation not permitted")) is None, "of sched_setaffinity, say"


def test_folders_are_made_where_they_can_be_and_never_directly_under_the_root(place: Path) -> None:
    proc, top = "cannot make a folder in /proc: ", "/cputrain-nowhere does not exist: create it first"
    if os.geteuid() != 0:
        proc = top = "is not writable"
    for output, why in {"/proc/x": proc, "/cputrain-nowhere/a": top}.items():
        message = refused(cputrain(*TRAIN.split(), f"output={output}", cwd=place))
        assert message.startswith(f"cputrain: output {output}: ") and why in message
    assert not Path("/cputrain-nowhere").exists()
    check_writable(place / "new/folders/inside", "output")
    assert not (place / "new").exists() and not list(place.glob(".cputrain-*"))


def test_a_file_in_place_of_a_folder_and_a_folder_in_place_of_a_file_are_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for act in ((tmp_path / "file").mkdir, (tmp_path / "file/below").mkdir, tmp_path.read_bytes):
        with pytest.raises(OSError, match=str(tmp_path)) as error:
            act()
        said = refusal(error.value)
        assert said is not None and said.startswith(f"{tmp_path}")
        assert said.endswith(": move away what is there, or name another folder")
