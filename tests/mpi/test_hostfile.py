"""Hostfiles of every launcher, right and wrong."""

import os
import re
import subprocess
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cputrain.affinity.errors import InputError
from cputrain.mpi.hostfile import MAX_SLOTS, Host, format_hosts, parse_hosts, read_hostfile
from tests.support.commands import HANGS_S, here, mpi_path, refused


def parsed(text: str) -> list[tuple[str, int | None]]:
    return [(host.name, host.slots) for host in parse_hosts(text, "f").hosts]


COMMENTED = [("h1", 1), ("h2", 2), ("h3", None)]


@pytest.mark.parametrize(
    ("text", "file_format", "hosts"),
    [
        ("h1\nh2\n", "plain", [("h1", None), ("h2", None)]),
        ("h1:4\r\nh2:2\r\n", "hydra", [("h1", 4), ("h2", 2)]),
        ("# job 7\n\nh1 slots=4 max_slots=8\nh2 slots=2 # slow\n", "openmpi", [("h1", 4), ("h2", 2)]),
        ("h1:2 binding=user:0,1\nh2:2 binding=user:2,3", "hydra", [("h1", 2), ("h2", 2)]),
        ("h1\nh1\nh2\nh2\n", "plain", [("h1", 2), ("h2", 2)]),  # $PBS_NODEFILE
        ("n[001-003]\ngpu-x3", "plain", [("n001", None), ("n002", None), ("n003", None), ("gpu-x3", None)]),
        ("me@h1:2\n10.0.0.7:4\n", "hydra", [("me@h1", 2), ("10.0.0.7", 4)]),
        ("fe80::1\n::1\n", "plain", [("fe80::1", None), ("::1", None)]),
        ("[fe80::1]:4\n", "hydra", [("[fe80::1]", 4)]),
        ("h1", "plain", [("h1", None)]),
        ("h1.foo. slots=2\nh2.foo.\n", "openmpi", [("h1.foo.", 2), ("h2.foo.", None)]),
        ("h1 slots = 2 max-slots=4\nh2 cpu=2\nh3 count= 2 port=22\n", "openmpi", [("h1", 2), ("h2", 2), ("h3", 2)]),
        ("// racks\n/* two,\n one new */\nh1 slots=1 // a\n/* b */h2 slots=2/* c */h3\n", "openmpi", COMMENTED),
        ("h1 slots=2\nh2 username=ana max_count=3\n", "openmpi", [("h1", 2), ("ana@h2", 3)]),
        ("h1 slots=2\nh1\n", "openmpi", [("h1", 3)]),
        ("h1:2\nh1\nh2\nh2:2\n", "hydra", [("h1", 3), ("h2", 3)]),
        ("h1:2\nh2:1\nh1:3\nh1\n", "hydra", [("h1", 6), ("h2", 1)]),
        ("h1:2 user=ana\n", "hydra", [("ana@h1", 2)]),
        ("rack[0-1]_blade[0-1]:2\n", "hydra", [(f"rack{i}_blade{j}", 2) for i in "01" for j in "01"]),
        ("h1 4 all.q@h1 UNDEFINED\nh2 4 all.q@h2 <NULL>\nh1 2 b.q@h1 0,1\n", "sge", [("h1", 6), ("h2", 4)]),
        ("h1 0,1,2,3\nh1 4-7\nh2 0\n", "lsf", [("h1", 2), ("h2", 1)]),  # $LSB_AFFINITY_HOSTFILE
        ("h1 1 0 2\nh1 2 0 2\nh2 1 0,1 1\n", "lsf", [("h1", 2), ("h2", 1)]),  # with membind
        ("c101\nc101\nc102\nc102\n", "plain", [("c101", 2), ("c102", 2)]),  # $LSB_DJOB_HOSTFILE
        ("h1.a slots=2\nh1.b slots=2\nh1 slots=1\n", "openmpi", [("h1.a", 2), ("h1.b", 2), ("h1", 1)]),
    ],
)
def test_every_format_is_recognized(text: str, file_format: str, hosts: list) -> None:
    assert parsed(text) == hosts
    assert parse_hosts(text, "f").format == file_format


NAMES = st.lists(st.from_regex(r"[a-z][a-z0-9]{0,6}(-[a-z0-9]{1,4})?", fullmatch=True), min_size=1, unique=True)


@pytest.mark.slow
@pytest.mark.parametrize("file_format", ["openmpi", "hydra", "plain"])
@given(names=NAMES, data=st.data())
def test_hostfiles_round_trip(file_format: str, names: list[str], data: st.DataObject) -> None:
    hosts = tuple(Host(name=name, slots=data.draw(st.integers(2, 9))) for name in names)
    assert parse_hosts(format_hosts(hosts, file_format), "f").hosts == hosts


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "contains no hosts"),
        ("# nothing\n\n", "contains no hosts"),
        ("h1 slots=4\nh2:4\n", "Open MPI's .* in line 1 and Intel MPI's and MPICH's .* in line 2"),
        ("h1 slots=four", "f:1: 'slots=four'"),
        ("h1:0", "0 slots"),
        ("h1 cpus=4", "'cpus=4' is not"),
        ("h1;reboot", "not a host name"),
        ("h1\n$(touch x)", "f:2"),
        ("n1..n4", "'n1..n4' is not a host name"),
        ("-oProxyCommand=x", "not a host name"),
        ("h 1", "f:1: 1 alone is not a number of slots and could be a CPU of LSF's affinity file: write slots=1"),
        ("h1 0,1\nh2:4", "the format of LSF's affinity file .* in line 1 and Intel MPI's .* in line 2"),
        ("h1:4 slots=4", "remove or correct it"),
        ("h1:99999999999", "set 1 to 65,536 slots"),
        ("h1 slots=70000", "set 1 to 65,536 slots"),
        (f"h1:{'9' * 5000}", "set 1 to 65,536 slots"),
        ("h1 slots=\u00b2", "is not slots=N"),
        ("h" * 4097, "more than 255 characters"),
        ("vm-a\nvm-a slots=2", r"f:2: vm-a is listed again, with slots, which Open MPI's format .*line 1"),
        ("h1 slots=2\nh1 slots=2", "f:2: h1 is listed again, with slots, which Open MPI's format"),
        ("h1:65536\nh2\nh1:1", "f:3: h1 has 65,537 slots in total, more than 65,536"),
        ("h1 slots=2 slots=3", "f:1: 'slots=3' repeats a setting .* Open MPI's format"),
        ("h1 slots=2 cpu=2", "f:1: 'cpu=2' repeats a setting .* Open MPI's format"),
        ("VM-A slots=2\nvm-a", "f:2: vm-a is spelled VM-A in line 1: use one spelling"),
        ("a@h1\nh1", "f:2: h1 is spelled a@h1 in line 1"),
        ("/* x */\n\nh1 slots=2\n\n/* h2", r"f:5: the comment after /\* is not closed"),
        ("// x\nh1:4", "Open MPI's .* in line 1 and Intel MPI's and MPICH's .* in line 2"),
        ("h1 4 all.q UNDEFINED\nh2:4", "Grid Engine's format .* in line 1 and Intel MPI's .* in line 2"),
        ("h1 slots=4 max_slots=2", "f:1: max_slots=2 is less than slots=4"),
        ("h1 slots=4\nh2 boards=1", "f:2: 'boards=1' is not slots=N.*; the line is in Open MPI's format"),
        ("h1 slots=2\nana@h2 port=2222", "port=2222 is a setting of Open MPI's format .* 'Host h2' into ~/.ssh/config"),
        ("rank 0=h1 slot=1", "f:1: '0=h1' is not slots=N"),
        (
            "10.0.0.1\n10.0.0.01",
            "f:2: '10.0.0.01' looks like an address but is not one: write four numbers",
        ),  # 10.0.0.1 for some programs
        ("28\n29", "f:1: '28' looks like an address but is not one: .* or the host's name"),  # for nid00028
        ("n1\n0x1c slots=2", "f:2: '0x1c' looks like an address but is not one"),
        ("ana@10.0.0.256:2", "f:1: 'ana@10.0.0.256' looks like an address"),
        ("h1\n[group]\nh2", r"f:2: hosts '\[group\]' contain '\[group\]', which is neither a name nor a range"),
    ],
)
def test_a_wrong_line_is_named(text: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        parse_hosts(text, "f")


@given(st.text(max_size=30))
def test_no_text_gives_a_name_that_a_shell_would_read(text: str) -> None:
    try:
        hosts = parse_hosts(text, "f").hosts
    except InputError:
        return
    assert all(
        set(host.name) <= set("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_.-@:[]%")
        for host in hosts
    )
    assert not any(host.name.startswith("-") for host in hosts)


@given(st.text(max_size=200) | st.text("h1 slots=:[]-,#\n@.\u00b2\u0663", max_size=60))
def test_any_text_is_a_hostfile_or_refused(text: str) -> None:
    try:
        hosts = parse_hosts(text, "f").hosts
    except InputError:
        return
    assert all(host.slots is None or 1 <= host.slots <= MAX_SLOTS for host in hosts)


@pytest.mark.parametrize(
    "text",
    [
        "h1 slots = 2 max-slots=4\nh2 cpu=2\nana@h3 count=3\n",
        "// old\n/* two,\n one new */\nh1 slots=2 /* a */ h2 slots=1\n",
        "h1 slots=2\nh1\n",
        "h1 max_slots=3\nh2 slots-max=2\n",
        "h1\nh1\nh1\n",
        "h1.foo. slots=2\n",
        "h1\nh1 slots=2\n",
        "h1 slots=2\nh1 slots=2\n",
        "h1 slots=2 slots=3\n",
        "h1 slots=3 max_slots=2\n",
        "h1 slots\n",
        "h1 Slots=2\n",
        "h1 boards=1 slots=2\n",
    ],
)
def test_hostfiles_are_read_or_refused_as_by_open_mpi(text: str, tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text(text)
    path = {**os.environ, **mpi_path("openmpi")}
    prefix = str(Path(path["PATH"].partition(":")[0]).resolve().parent)
    options = ("--allow-run-as-root", "--prefix", prefix, "--hostfile", "hosts", "--map-by", "slot:NOLOCAL")
    argv = ["mpirun", *options, "-np", "1", "--display", "allocation", "--do-not-launch", "true"]
    result = subprocess.run(
        argv, env=path, cwd=tmp_path, capture_output=True, text=True, errors="replace", timeout=HANGS_S
    )
    read = dict(re.findall(r"^ +(h\d\S*): slots=(\d+)", result.stdout, re.MULTILINE))
    if "hostfile:" in result.stderr:
        with pytest.raises(InputError, match=r"hosts:[12]"):
            read_hostfile(tmp_path / "hosts")
    else:
        ours = read_hostfile(tmp_path / "hosts").hosts
        assert {host.name.rpartition("@")[2].partition(".")[0]: str(host.slots) for host in ours} == read, result.stderr


@pytest.mark.parametrize("text", ["h1:2\nh1:2\n", "h1:2\nh2:1\nh1:3\n", "h1:2\nh1\n", "h1:3\t binding=user:0\r\n"])
def test_hydra_s_hostfiles_are_read_as_by_mpich(text: str, tmp_path: Path) -> None:
    (tmp_path / "hosts").write_bytes(text.encode())
    hosts = read_hostfile(tmp_path / "hosts").hosts
    path = {**os.environ, **mpi_path("mpich")}
    ranks = str(sum(host.slots or 1 for host in hosts))
    argv = ["mpiexec", "-f", "hosts", "-n", ranks, "-rmk", "user", "-launcher", "fork", "-v", "true"]
    shown = subprocess.run(argv, env=path, cwd=tmp_path, capture_output=True, text=True, timeout=HANGS_S).stdout
    read: Counter[str] = Counter()
    for name, cores in re.findall(r"\] proxy: (\S+) \((\d+) cores\)", shown):
        read[name] += int(cores)
    assert read == {host.name: host.slots for host in hosts}


def test_a_byte_order_mark_is_no_part_of_a_name(tmp_path: Path) -> None:
    (tmp_path / "hosts").write_bytes(b"\xef\xbb\xbfh1 slots=2\r\nh2 slots=2\r\n")
    assert read_hostfile(tmp_path / "hosts").hosts == (Host(name="h1", slots=2), Host(name="h2", slots=2))
    options = ("--machine", "skx-8160-2s", "--hostfile", "hosts", "--launcher", "mpich", "--write", "job")
    assert here("plan", *options, cwd=tmp_path).returncode == 0
    assert (tmp_path / "job/hosts").read_text() == "h1:2\nh2:2\n"


@pytest.mark.parametrize("encoding", ["latin-1", "utf-16"])
def test_a_hostfile_in_another_encoding_is_refused_with_what_to_do(encoding: str, tmp_path: Path) -> None:
    (tmp_path / "hosts").write_bytes("n1\nn\u00e9\n".encode(encoding))
    with pytest.raises(InputError, match=r"hosts is not UTF-8 .*: save it as UTF-8 text, one host"):
        read_hostfile(tmp_path / "hosts")


def test_a_short_name_that_no_address_tells_apart_is_its_longer_one(tmp_path: Path) -> None:
    """As for Open MPI, which refuses two numbers of slots and counts two lines without."""
    for text in ("n1 slots=1\nn1.invalid slots=1\n", "n1\nn1.invalid\n"):
        (tmp_path / "hosts").write_text(text)
        line = refused(here("launch", "--dry-run", "--hostfile", "hosts", "--", "true", cwd=tmp_path))
        assert "hosts: n1 and n1.invalid are one host" in line


def test_utf_16_without_a_byte_order_mark_is_refused(tmp_path: Path) -> None:
    (tmp_path / "hosts").write_bytes("n1\nn2\n".encode("utf-16-le"))  # it is UTF-8, too, with null characters
    with pytest.raises(InputError, match=r"hosts contains null characters, .* save it as UTF-8"):
        read_hostfile(tmp_path / "hosts")


def test_addresses_of_ipv6_are_written_as_their_launcher_reads_them() -> None:
    hosts = (Host(name="[fe80::1]", slots=2), Host(name="ana@[fe80::2]", slots=2))
    assert format_hosts(hosts, "openmpi") == "fe80::1 slots=2\nana@fe80::2 slots=2\n"
    with pytest.raises(InputError, match="do not take in lists: give its name"):
        format_hosts(hosts, "hydra")


def test_endless_files_are_refused() -> None:
    with pytest.raises(InputError, match="larger than 64 MiB"):
        read_hostfile(Path("/dev/zero"))


def test_unreadable_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "b").write_bytes(b"\xff\xfe\x00")
    for path in (tmp_path / "absent", tmp_path / "b", tmp_path):
        with pytest.raises(InputError, match=r"hostfile .*: (give a file|save it as UTF-8).* one host per line"):
            read_hostfile(path)


def test_ten_thousand_hosts() -> None:
    hosts = tuple(Host(name=f"n{i:05}", slots=4) for i in range(10_000))
    for file_format in ("openmpi", "hydra"):
        assert parse_hosts(format_hosts(hosts, file_format), "f").hosts == hosts
