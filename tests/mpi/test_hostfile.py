"""Hostfiles of every launcher, right and wrong."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from affinity.errors import InputError
from mpi.hosts.hostfile import MAX_SLOTS, Host, format_hosts, parse_hosts, read_hostfile


def parsed(text: str) -> list[tuple[str, int | None]]:
    return [(host.name, host.slots) for host in parse_hosts(text, "f").hosts]


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
    ],
)
def test_every_format_is_recognized(text: str, file_format: str, hosts: list) -> None:
    assert parsed(text) == hosts
    assert parse_hosts(text, "f").format == file_format


NAMES = st.lists(st.from_regex(r"[a-z][a-z0-9]{0,6}(-[a-z0-9]{1,4})?", fullmatch=True), min_size=1, unique=True)


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
        ("h1 slots=4\nh2:4\n", "line 1 is in Open MPI's .* line 2 in Intel MPI's and MPICH's"),
        ("h1:4\nh1:4\n", "f:2: the file contains h1 twice"),
        ("h1 slots=four", "f:1: 'slots=four'"),
        ("h1:0", "0 slots"),
        ("h1 cpus=4", "'cpus=4' is not"),
        ("h1;reboot", "not a host name"),
        ("h1\n$(touch x)", "f:2"),
        ("-oProxyCommand=x", "not a host name"),
        ("h 1", "'1' is not"),
        ("h1:4 slots=4", "remove or correct it"),
        ("h1:99999999999", "set slots to 1 to 65,536"),
        ("h1 slots=70000", "set slots to 1 to 65,536"),
        (f"h1:{'9' * 5000}", "set slots to 1 to 65,536"),
        ("h1 slots=\u00b2", "is not slots=N"),
        ("h" * 4097, "more than 255 characters"),
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


def test_endless_files_are_refused() -> None:
    with pytest.raises(InputError, match="larger than 64 MiB"):
        read_hostfile(Path("/dev/zero"))


def test_unreadable_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "b").write_bytes(b"\xff\xfe\x00")
    for path in (tmp_path / "absent", tmp_path / "b", tmp_path):
        with pytest.raises(InputError, match=r"hostfile .*: give a file with one host per line"):
            read_hostfile(path)


def test_ten_thousand_hosts() -> None:
    hosts = tuple(Host(name=f"n{i:05}", slots=4) for i in range(10_000))
    for file_format in ("openmpi", "hydra"):
        assert parse_hosts(format_hosts(hosts, file_format), "f").hosts == hosts
