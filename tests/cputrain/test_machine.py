"""cputrain machine save, and plans of a folder of machines."""

import tarfile
from dataclasses import replace
from pathlib import Path

import pytest

from cputrain.affinity.errors import InputError
from cputrain.affinity.planner.plan import plan_machine
from cputrain.affinity.planner.request import Request
from cputrain.affinity.topology.catalog import find_machine
from cputrain.affinity.topology.sysfs import read_machine, this_machine
from cputrain.affinity.topology.tarball import save_machine
from cputrain.cli import main
from tests.support.machines import build_machine, write_sysfs

MACHINES = Path(__file__).parents[1] / "machines"


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.nightly
def test_a_folder_of_machines_is_planned_as_a_table(golden, capsys: pytest.CaptureFixture[str]) -> None:
    """Exit status 1: three files of the folder are damaged."""
    assert main(["plan", "--machines", str(MACHINES)]) == 1
    golden("machines.txt", capsys.readouterr().out.rstrip("\n"))


def test_one_row_for_each_machine_below_the_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_sysfs(build_machine(2, 1, 4, 2), tmp_path / "some/host")
    assert main(["plan", "--machines", str(tmp_path), "--ppn", "2"]) == 0
    assert capsys.readouterr().out.splitlines()[1].split() == [
        "some/host",
        "2",
        "2",
        "8",
        "16",
        "2",
        "x",
        "4",
        *"00",
        "bind",
    ]
    (tmp_path / "empty.xml").write_text("")
    assert main(["plan", "--machines", str(tmp_path)]) == 1
    assert "error: cannot read empty.xml: " in capsys.readouterr().out


@pytest.mark.parametrize("options", [["--machine", "skx-8160-2s"], ["--format", "json"], ["--share"]])
def test_the_table_takes_no_option_of_one_machine(
    tmp_path: Path, options: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", "--machines", str(tmp_path), *options]) == 2
    assert "remove --machine" in capsys.readouterr().err


def test_an_empty_folder_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--machines", str(tmp_path)]) == 2
    assert "contains no tarball" in capsys.readouterr().err


def test_this_host_s_tarball_reads_back_to_the_same_plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["machine", "save", "here.tar.xz"]) == 0
    assert "plan with: cputrain plan --machine here.tar.xz" in capsys.readouterr().out
    here, saved = this_machine(), find_machine("here.tar.xz")
    assert saved == here
    assert replace(plan_machine(saved, Request()), machine=here) == plan_machine(here, Request())
    assert main(["machine", "save", "here.tar.xz"]) == 2
    assert "already exists" in capsys.readouterr().err


def test_a_saved_machine_tells_limits_but_nothing_of_its_user(tmp_path: Path) -> None:
    root = tmp_path / "host"
    write_sysfs(build_machine(1, 2, 4, 2), root)
    for name, text in {
        "proc/self/status": "Name:\tsecret\nUid:\t1000\nCpus_allowed_list:\t0-3,8-11\nMems_allowed_list:\t0\n",
        "proc/mounts": "server:/secret /home nfs rw 0 0\ncgroup2 /sys/fs/cgroup cgroup2 rw 0 0\n",
        "proc/self/cgroup": "0::/job\n",
        "sys/fs/cgroup/job/cpu.max": "200000 100000\n",
        "sys/fs/cgroup/job/other": "secret\n",
        "sys/devices/system/node/node0/secret": "secret\n",
    }.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    save_machine(root, tmp_path / "n1.tar.gz")
    saved = find_machine(str(tmp_path / "n1.tar.gz"))
    assert saved == read_machine(root)
    assert (saved.allowed_pus, saved.allowed_nodes, saved.cpu_quota) == ((0, 1, 2, 3, 8, 9, 10, 11), (0,), 2.0)
    with tarfile.open(tmp_path / "n1.tar.gz") as tar:
        contents = [tar.extractfile(member).read() for member in tar if member.isfile()]
    assert not any(b"secret" in content for content in contents)


def test_a_name_that_is_no_tarball_s_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"name it HOST\.tar\.xz"):
        save_machine(tmp_path, tmp_path / "host.zip")


def test_a_machine_is_saved_into_a_new_folder(tmp_path: Path) -> None:
    assert main(["machine", "save", str(tmp_path / "new/host.tar")]) == 0
    assert (tmp_path / "new/host.tar").is_file()
