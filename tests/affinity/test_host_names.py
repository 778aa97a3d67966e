"""A host is its full name: found by any of its names and addresses, never by those of another one."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cputrain.affinity.errors import InputError
from cputrain.affinity.host_names import find_host, host_key, host_labels, is_loopback, network_name, repeated_host
from cputrain.affinity.planner.plan_file import plan_of_host
from tests.support.commands import HANGS_S, need

WORKERS = ("mpi-worker.1.foo.example", "mpi-worker.2.foo.example")  # as Docker, Kubernetes and OpenStack name them


@pytest.mark.parametrize(
    ("host", "listed", "found"),
    [
        (WORKERS[1], WORKERS, 1),
        ("mpi-worker.2", WORKERS, 1),
        ("mpi-worker.2.foo.example.org", WORKERS, 1),
        ("mpi-worker.3.foo.example", WORKERS, None),
        ("mpi-worker.2.foo.example", WORKERS[:1], None),
        ("a", ("a.b", "a"), 1),
        ("a.b", ("a", "a.b"), 1),
        ("a", ("c", "a.b"), 1),
        ("10.0.0.2", ("10.0.0.1", "10.0.0.2"), 1),
        ("10.0.0.2", ("10.0.0.1",), None),
        ("10", ("10.0.0.1",), None),
        ("n1", ("N1",), 0),
        ("N1.Cluster", ("n2.cluster", "n1.cluster"), 1),
        ("n1", ("user@n2", "user@n1"), 1),
        ("n1.cluster", ("n1.cluster.",), 0),
        ("n1.cluster.", ("n1.cluster",), 0),
        ("FE80::1", ("[fe80:0::2]", "[fe80:0::1]"), 1),
        ("::ffff:10.0.0.2", ("10.0.0.1", "10.0.0.2"), 1),
        ("n1.local", ("n1.hpc.example.org", "n2.hpc.example.org"), 0),  # as a scheduler in another domain names it
        ("n1.local", ("n1.hpc.example.org", "n1"), 1),
        ("x", ("n1",), None),
    ],
)
def test_a_host_is_found_by_its_own_name_only(host: str, listed: tuple[str, ...], found: int | None) -> None:
    assert find_host(host, listed) == found


@pytest.mark.parametrize(
    ("host", "listed"), [("mpi-worker", WORKERS), ("n1", ("n1.a", "n1.b")), ("n1.local", ("n1.a.org", "n1.b.org"))]
)
def test_a_short_name_of_several_hosts_is_refused_with_their_names(host: str, listed: tuple[str, ...]) -> None:
    with pytest.raises(InputError, match=f"^host {host} may be {listed[0]} or {listed[1]}: use its full name$"):
        find_host(host, listed)


def test_each_host_gets_the_plan_of_its_own_group() -> None:
    data = {"host_groups": [{"hosts": [name], "plan": name} for name in (*WORKERS, "10.0.0.1", "ana@N7", "a.b")]}
    for host, plan in (*zip(WORKERS, WORKERS, strict=True), ("10.0.0.1", "10.0.0.1"), ("n7", "ana@N7"), ("a", "a.b")):
        assert plan_of_host(data, host) == plan
    with pytest.raises(InputError, match=r"host 10\.0\.0\.2 is not in the plan"):
        plan_of_host(data, "10.0.0.2")


@pytest.mark.parametrize(
    ("hosts", "labels"),
    [
        (("n1.cluster", "n2.cluster"), ("n1", "n2")),
        ((*WORKERS, "db.1.foo"), ("mpi-worker.1", "mpi-worker.2", "db")),
        (("a", "a.b", "A.C"), ("a", "a.b", "A.C")),
        (("10.0.0.1", "10.0.0.2"), ("10.0.0.1", "10.0.0.2")),
        (("ana@n1.x.", "[fe80::1]"), ("n1", "fe80::1")),
    ],
)
def test_labels_are_short_and_tell_hosts_apart(hosts: tuple[str, ...], labels: tuple[str, ...]) -> None:
    assert host_labels(hosts) == labels


LABELS = st.lists(st.sampled_from(["a", "B", "b", "1", "2", "n1"]), min_size=1, max_size=4).map(".".join)


@given(st.lists(LABELS, min_size=1, max_size=12, unique_by=host_key))
def test_no_two_hosts_share_a_label_and_each_finds_itself(hosts: list[str]) -> None:
    labels = host_labels(hosts)
    assert len({label.lower() for label in labels}) == len(hosts)
    assert [find_host(host, hosts) for host in hosts] == list(range(len(hosts)))


def test_spellings_of_one_host() -> None:
    assert network_name("ana@[fe80::1]") == "fe80::1" and network_name("ana@n1.") == "n1."
    assert repeated_host(["n1", "n2", "ana@N1."]) == ("n1", "ana@N1.")
    assert repeated_host(["n1", "n1.a", "n1.b", "10.0.0.1", "10.0.0.2"]) is None
    assert repeated_host(["localhost", "n1", "127.0.0.1"]) == ("localhost", "127.0.0.1")
    assert repeated_host(["::1", "ana@Localhost"]) == ("::1", "ana@Localhost")
    assert repeated_host(["127.0.0.1", "127.0.0.2"]) is None
    assert repeated_host(["localhost", "[::ffff:127.0.0.1]"]) == ("localhost", "[::ffff:127.0.0.1]")
    assert [is_loopback(host) for host in ("localhost", "127.0.0.1", "::1", "10.0.0.1", "n1")] == [1, 1, 1, 0, 0]


FIND = "import sys; from cputrain.affinity.host_names import find_this_host; print(find_this_host(sys.argv[1:]))"


TWICE = (
    "import sys; from cputrain.affinity.host_names import repeated_this_host; print(repeated_this_host(sys.argv[1:]))"
)


def found_here(name: str, hosts: str, listed: list[str], folder: Path, code: str = FIND) -> str:
    """What a host of that name, with these lines in its /etc/hosts, finds of itself in a list; "" and a line if it is
    refused."""
    need("util-linux", "unshare")
    if os.geteuid() != 0:
        pytest.skip(reason="needs root (namespaces)")
    (folder / "hosts").write_text(hosts)
    (folder / "nsswitch").write_text("hosts: files\n")
    mounts = f"mount --bind {folder}/hosts /etc/hosts && mount --bind {folder}/nsswitch /etc/nsswitch.conf"
    network = "ip link set lo up && ip addr add 10.7.0.1/32 dev lo"
    script = f'hostname {name} && {mounts} && {network} && exec "$@"'
    argv = ["unshare", "--uts", "--mount", "--net", "sh", "-c", script, "sh", sys.executable, "-c", code, *listed]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=HANGS_S)
    return done.stdout.strip() or done.stderr.strip().splitlines()[-1]


@pytest.mark.parametrize(
    ("name", "hosts", "listed", "found"),
    [
        ("n1.local", "", ["n2", "n1"], "1"),
        ("node17", "", ["10.7.0.2", "10.7.0.1"], "1"),
        (
            "mpi-worker",
            "10.7.0.9 mpi-worker.1.foo\n10.7.0.1 mpi-worker.2.foo\n",
            ["mpi-worker.1.foo", "mpi-worker.2.foo"],
            "1",
        ),
        ("n1.local", "10.7.0.9 n1.a.org\n10.7.0.1 n1.b.org\n", ["n1.a.org", "n1.b.org"], "1"),
        ("n1.local", "10.7.0.9 n1.a.org\n", ["n1.a.org"], "None"),  # that is another host
        ("n1.local", "", ["n1.a.org", "n2.a.org"], "0"),
        ("ip-7", "10.7.0.1 ip-7.internal worker-3\n", ["worker-2", "worker-3"], "None"),
        ("mpi-worker", "", ["mpi-worker.1.foo", "mpi-worker.2.foo"], "may be mpi-worker.1.foo or mpi-worker.2.foo"),
        ("x", "", ["n1", "localhost"], "1"),
    ],
)
def test_this_host_is_known_by_its_names_and_addresses(
    name: str, hosts: str, listed: list[str], found: str, tmp_path: Path
) -> None:
    output = found_here(name, hosts, listed, tmp_path)
    assert output == found or (" " in found and found in output)


@pytest.mark.parametrize(
    ("name", "hosts", "listed", "twice"),
    [
        ("vm", "", ["vm", "localhost"], "('vm', 'localhost')"),
        ("vm", "", ["ana@VM.", "n1", "127.0.0.1"], "('ana@VM.', '127.0.0.1')"),
        ("vm.a.org", "", ["n1", "vm", "10.7.0.1"], "('vm', '10.7.0.1')"),
        ("vm", "", ["vm.a.org", "localhost"], "('vm.a.org', 'localhost')"),
        ("vm", "127.0.1.1 vm.a.org vm\n", ["vm", "vm.a.org"], "('vm', 'vm.a.org')"),
        ("vm", "10.7.0.1 vm worker-3 # mine\n", ["worker-3", "10.7.0.1"], "('worker-3', '10.7.0.1')"),
        ("vm", "10.7.0.9 other\n", ["vm", "other", "10.7.0.9"], "None"),
        ("worker", "", ["worker.1.a", "worker.2.a", "localhost"], "None"),  # one of the two, or neither
        ("vm", "", ["127.0.0.2", "127.0.0.3", "vm"], "None"),
        ("vm", "", ["vm"], "None"),
    ],
)
def test_names_and_addresses_of_this_host_are_one_host(
    name: str, hosts: str, listed: list[str], twice: str, tmp_path: Path
) -> None:
    assert found_here(name, hosts, listed, tmp_path, TWICE) == twice


ONE_HOST = (
    "import sys; from cputrain.affinity.host_names import names_of_one_host; "
    "print(*(names_of_one_host(sys.argv[1:], by_name=by_name) for by_name in (False, True)))"
)


@pytest.mark.parametrize(
    ("hosts", "listed", "twice"),
    [
        ("10.7.0.9 n1.a n1\n10.7.0.8 n2.a n2\n", ["n2", "n1", "n1.a"], "('n1', 'n1.a') ('n1', 'n1.a')"),
        ("10.7.0.9 n1.a n1\n", ["n1.a", "ana@N1"], "('ana@N1', 'n1.a') ('ana@N1', 'n1.a')"),
        ("10.7.0.9 n1.a\n10.7.0.8 n1\n", ["n1", "n1.a"], "None None"),
        ("10.7.0.9 n1.a n1.b\n", ["n1.a", "n1.b", "n1"], "None None"),  # n1 is unknown, the others are not short
        ("", ["n1", "n1.a"], "None ('n1', 'n1.a')"),
        ("10.7.0.9 n1.a\n", ["n2", "n1.a", "n1"], "None ('n1', 'n1.a')"),
        ("", ["n1", "n1.a", "n1.b"], "None None"),  # either, or a third
        ("", ["10.7", "10.7.0.9", "n1", "n10.a"], "None None"),
    ],
)
def test_a_name_and_its_short_form_with_one_address_are_one_host(
    hosts: str, listed: list[str], twice: str, tmp_path: Path
) -> None:
    assert found_here("x", hosts, listed, tmp_path, ONE_HOST) == twice


HERE = "import sys; from cputrain.affinity.host_names import is_this_host; print([*map(is_this_host, sys.argv[1:])])"


@pytest.mark.parametrize(
    ("name", "hosts", "listed", "found"),
    [
        ("n1", "", ["n1", "N1.", "localhost", "10.7.0.1", "n1.a.org", "n2", "10.7.0.2"], [1, 1, 1, 1, 1, 0, 0]),
        ("n1", "10.7.0.9 n1.a.org\n10.7.0.1 n1.b.org\n", ["n1.a.org", "n1.b.org"], [0, 1]),
        ("n1.a.org", "10.7.0.9 n1\n", ["n1", "n1.a.org"], [0, 1]),
    ],
)
def test_a_longer_name_with_the_address_of_another_host_is_not_this_one(
    name: str, hosts: str, listed: list[str], found: list[int], tmp_path: Path
) -> None:
    assert found_here(name, hosts, listed, tmp_path, HERE) == str([bool(each) for each in found])
