"""Lists of hosts, expanded and folded as Slurm does."""

import os
import subprocess
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cputrain.affinity.errors import InputError
from cputrain.mpi.hostfile import expand_hosts, fold_hosts
from tests.support.commands import need

NAMES = st.builds(
    lambda prefix, number, width, suffix: f"{prefix}{number:0{width}}{suffix}",
    st.sampled_from(["n", "node-", "gpu-x", "a1b"]),
    st.integers(0, 1200),
    st.integers(1, 4),
    st.sampled_from(["", "-ib", ".cluster"]),
)


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("n1", ("n1",)),
        ("n1, n2 ,n3", ("n1", "n2", "n3")),
        ("n1 n2\nn[3-4]\n", ("n1", "n2", "n3", "n4")),  # $(scontrol show hostnames), flux hostlist -e
        ("n[001-003,130],gpu-x3", ("n001", "n002", "n003", "n130", "gpu-x3")),
        ("n[9-11]", ("n9", "n10", "n11")),
        ("r[1-2]-ib", ("r1-ib", "r2-ib")),
        ("localhost", ("localhost",)),
    ],
)
def test_lists_as_slurm_writes_them(text: str, hosts: tuple[str, ...]) -> None:
    assert expand_hosts(text) == hosts
    assert expand_hosts(fold_hosts(hosts)) == hosts


@given(st.lists(NAMES, min_size=1, max_size=60, unique=True))
def test_folding_and_expanding_round_trip(hosts: list[str]) -> None:
    assert expand_hosts(fold_hosts(hosts)) == tuple(hosts)


def test_ranges_are_short() -> None:
    hosts = [f"n{i:05}" for i in range(1, 10_001)]
    assert fold_hosts(hosts) == "n[00001-10000]"
    assert fold_hosts(["n9", "n10", "n11", "n13"]) == "n[9-11,13]"
    assert fold_hosts(["n098", "n099", "n100"]) == "n[098-100]"


@pytest.mark.parametrize("text", ["", ",", "n1,n1", "n[3-1]", "n[a]", "n[1-2", "n]1", "n[1-99999999]", "n[[1]]"])
def test_nonsense_is_refused(text: str) -> None:
    with pytest.raises(InputError, match="hosts"):
        expand_hosts(text)


@pytest.mark.parametrize(
    ("text", "limit"),
    [
        ("n[1-99999999999]", "more than 9 digits"),
        (f"n[1-{'9' * 5000}]", "more than 9 digits"),
        ("n[0-999999999]", "more than 200,000 hosts"),
        (f"n[{','.join(['1-190000'] * 1000)}]", "more than 200,000 hosts"),
        (",".join(f"{name}[1-150000]" for name in "abcdefgh"), "more than 200,000 hosts"),
        ("n" + "[0-9]" * 9, "more than 200,000 hosts"),
        ("n[\u0661-\u0663]", "neither a name nor a range"),
        ("n[\u00b2]", "neither a name nor a range"),
    ],
    ids=[
        "a count",
        "5,000 digits",
        "nine digits",
        "many ranges",
        "many names",
        "many groups",
        "Arabic digits",
        "a superscript",
    ],
)
def test_lists_beyond_a_limit_are_refused_at_once_with_the_limit(text: str, limit: str) -> None:
    started = time.process_time()
    with pytest.raises(InputError, match=limit):
        expand_hosts(text)
    assert time.process_time() - started < 2


@given(st.text(max_size=200) | st.text("n0159[]-,", max_size=60))
def test_any_text_is_a_list_or_refused(text: str) -> None:
    try:
        hosts = expand_hosts(text)
    except InputError:
        return
    assert hosts and len(set(hosts)) == len(hosts)


@pytest.mark.parametrize(
    "text",
    [
        "rack[0-1]_blade[0-1]",
        "n[1][2]",
        "n[1-2][3-4],m",
        "a[1-2]b[1-2]c[1-2]",
        "n[0-1][0-1][0-1][0-1]",
        "n[08-10],r[1,3-4]-[01-02]",
        "n[001-3]",
        "10.0.0.[1-2]",
        "n1.foo.,n2",
        "n[1-2] m[1-2]",
        "n1\nn2",
    ],
)
def test_lists_are_expanded_as_slurm_does(text: str, tmp_path: Path) -> None:
    need("slurm-client", "scontrol")
    (tmp_path / "slurm.conf").write_text("ClusterName=c\nSlurmctldHost=localhost\nAuthType=auth/none\n")
    env = {**os.environ, "SLURM_CONF": str(tmp_path / "slurm.conf")}
    argv = ["scontrol", "show", "hostnames", text]
    result = subprocess.run(argv, env=env, capture_output=True, text=True, check=True)
    assert expand_hosts(text) == tuple(result.stdout.split())


def test_a_host_is_in_a_list_once_however_it_is_written() -> None:
    for text, same in (
        ("N1,n1", "N1 and n1"),
        ("n1.a,ana@n1.a.", "n1.a and ana@n1.a."),
        ("n[1,01],N01", "n01 and N01"),
    ):
        with pytest.raises(InputError, match=f"contain {same}, the same host"):
            expand_hosts(text)
    assert expand_hosts("[fe80::1]:4,[fe80::2]:4,n[1-2]-ib") == ("[fe80::1]:4", "[fe80::2]:4", "n1-ib", "n2-ib")
