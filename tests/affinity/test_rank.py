import struct
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cputrain.affinity.errors import InputError
from cputrain.affinity.rank import (
    APINFO_HEADER,
    APINFO_RANK,
    LAUNCHER_VARIABLES,
    MAX_RANKS,
    START_IDS,
    Rank,
    local_rank_of,
    pals_application,
    rank_from_env,
    rendezvous,
    rendezvous_address,
    tasks_per_node,
    with_rank,
)

ENVIRONMENTS = {
    "env": {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"},
    "openmpi": {
        "OMPI_COMM_WORLD_RANK": "3",
        "OMPI_COMM_WORLD_SIZE": "4",
        "OMPI_COMM_WORLD_LOCAL_RANK": "1",
        "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    },
    "mvapich": {
        "MV2_COMM_WORLD_RANK": "3",
        "MV2_COMM_WORLD_SIZE": "4",
        "MV2_COMM_WORLD_LOCAL_RANK": "1",
        "MV2_COMM_WORLD_LOCAL_SIZE": "2",
    },
    "intelmpi": {"PMI_RANK": "3", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"},
    "pals": {"PALS_RANKID": "3", "PMI_SIZE": "4", "PALS_LOCAL_RANKID": "1", "PALS_LOCAL_SIZE": "2"},
    "srun": {
        "SLURM_PROCID": "3",
        "SLURM_STEP_NUM_TASKS": "4",
        "SLURM_LOCALID": "1",
        "SLURM_NODEID": "1",
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
    },
}


@pytest.mark.parametrize("launcher", ENVIRONMENTS)
def test_every_launcher_is_understood(launcher: str) -> None:
    expected = Rank(rank=3, world_size=4, local_rank=1, local_world_size=2, convention=launcher)
    assert rank_from_env(ENVIRONMENTS[launcher]) == expected
    if launcher not in ("srun", "pals"):  # a launcher inside a Slurm job decides, not the batch script's variables
        assert rank_from_env({**ENVIRONMENTS["srun"], **ENVIRONMENTS[launcher]}) == expected


def test_every_record_has_a_case_here_and_its_place_among_the_ids() -> None:
    assert {each.convention for each in LAUNCHER_VARIABLES if each.rank_names} == set(ENVIRONMENTS)
    assert sorted(START_IDS) == sorted(each.start_id for each in LAUNCHER_VARIABLES if each.start_id)


def test_no_launcher_is_no_rank() -> None:
    assert rank_from_env({}) is None
    assert rank_from_env({"SLURM_PROCID": "0", "SLURM_NTASKS": "4"}) is None  # a batch script, not a task
    shell = {**ENVIRONMENTS["srun"], "SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"}
    assert rank_from_env(shell) is None  # srun --pty bash


def test_srun_with_pmi2_is_srun() -> None:
    rank = rank_from_env({**ENVIRONMENTS["srun"], "PMI_RANK": "3", "PMI_SIZE": "4"})
    assert rank is not None and rank.convention == "srun"


APPLICATION = {"PALS_RANKID": "3", "PALS_LOCAL_RANKID": "0", "PALS_NODEID": "1", "PMI_RANK": "3"}


def pals_file(folder: Path, host_of: tuple[int, ...], hosts: tuple[bytes, ...]) -> Path:
    """Write the file that PALS and Slurm write for Cray's PMI, with one command and no tokens."""
    ranks_at = APINFO_HEADER.size + 12
    hosts_at = ranks_at + len(host_of) * APINFO_RANK.size
    tables = (12, APINFO_HEADER.size, 1, APINFO_RANK.size, ranks_at, len(host_of), 68, hosts_at, len(hosts))
    ranks = b"".join(APINFO_RANK.pack(host_of[:i].count(host), 0, host) for i, host in enumerate(host_of))
    names = b"".join(struct.pack("i64s", i, name) for i, name in enumerate(hosts))
    path = folder / "apinfo"
    path.write_bytes(APINFO_HEADER.pack(1, hosts_at + len(names), 52, 112, 0, *tables) + bytes(12) + ranks + names)
    return path


def test_sizes_that_pals_does_not_export_are_in_its_file(tmp_path: Path) -> None:
    file = pals_file(tmp_path, (0, 0, 0, 1), (b"n1", b"n2"))
    env = {**APPLICATION, "PALS_APINFO": str(file)}
    rank = rank_from_env(env)
    assert rank == Rank(rank=3, world_size=4, local_rank=0, local_world_size=1, convention="pals")
    assert rendezvous_address(rank, env)[0] == "n1"
    assert with_rank(rank, {**env, "MASTER_ADDR": "localhost"})["NODE_RANK"] == "1"
    assert rank_from_env({**APPLICATION, "PMI_SIZE": "4", "PMI_LOCAL_SIZE": "1"}) == rank  # Slurm's cray_shasta
    found = rank_from_env({**ENVIRONMENTS["srun"], **APPLICATION, "PMI_SIZE": "4", "PMI_LOCAL_SIZE": "1"})
    assert found is not None and found.convention == "srun"


def test_pals_without_sizes_says_what_to_give(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"^PALS_RANKID is set, but not PMI_SIZE, .* PALS_APINFO is not .*: set RANK,"):
        rank_from_env(APPLICATION)
    file = pals_file(tmp_path, (0, 1), (b"n1", b"n2"))
    other_host = file.read_bytes().replace(APINFO_RANK.pack(0, 0, 1), APINFO_RANK.pack(0, 0, 2))
    for content in (b"", file.read_bytes()[:-1], b"\xff" * 200, other_host):
        file.write_bytes(content)
        with pytest.raises(InputError, match=r"^PALS_APINFO=.* is not a description of ranks by PALS: set RANK,"):
            rank_from_env({**APPLICATION, "PALS_APINFO": str(file)})


def test_a_file_of_pals_that_cannot_be_read_is_named() -> None:
    with pytest.raises(InputError, match=r"^cannot read PALS_APINFO=x{100} \(File name too long\): set RANK, "):
        rank_from_env({**APPLICATION, "PALS_APINFO": "x" * 5000})


@given(st.binary(max_size=150), st.integers(0, 200), st.binary(max_size=40))
def test_any_file_of_pals_is_read_or_refused(header: bytes, at: int, edit: bytes) -> None:
    with TemporaryDirectory() as folder:
        file = pals_file(Path(folder), (0, 0, 1), (b"n1", b"n2"))
        valid = file.read_bytes()
        for data in (header, valid[:at] + edit + valid[at + len(edit) :]):
            file.write_bytes(data)
            try:
                found = pals_application({"PALS_APINFO": str(file)})
            except InputError:
                continue
            assert found is not None and all(0 <= host < len(found.hosts) for host in found.host_of)


def test_pmix_alone_says_what_to_give() -> None:
    given = r"^PMIX_RANK is set, but no world size, .*: set RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE for each"
    with pytest.raises(InputError, match=given):
        rank_from_env({"PMIX_RANK": "3", "PMIX_NAMESPACE": "prterun-n1-17@1"})
    rank = rank_from_env({"PMIX_RANK": "3", "PMIX_NAMESPACE": "a", **ENVIRONMENTS["env"]})
    assert rank is not None and rank.convention == "env"


@pytest.mark.parametrize(
    "env",
    [
        {"RANK": "0", "WORLD_SIZE": "2"},
        {**ENVIRONMENTS["env"], "RANK": "4"},
        {**ENVIRONMENTS["env"], "RANK": "x"},
        {**ENVIRONMENTS["env"], "LOCAL_RANK": "2"},
        {"PMI_RANK": "0", "PMI_SIZE": "2"},
    ],
)
def test_contradictions_are_refused(env: dict[str, str]) -> None:
    with pytest.raises(InputError):
        rank_from_env(env)


@given(st.lists(st.integers(1, 64), min_size=1, max_size=20))
def test_tasks_per_node_unfolds(counts: list[int]) -> None:
    folded: list[list[int]] = []
    for count in counts:
        if folded and folded[-1][0] == count:
            folded[-1][1] += 1
        else:
            folded.append([count, 1])
    text = ",".join(f"{count}(x{times})" if times > 1 else str(count) for count, times in folded)
    assert tasks_per_node({"SLURM_TASKS_PER_NODE": text}, "SLURM_TASKS_PER_NODE") == tuple(counts)


@pytest.mark.parametrize("tasks", ["2(y3)", "2(x99999999)"])
def test_damaged_tasks_per_node_are_named_by_their_variable(tasks: str) -> None:
    with pytest.raises(InputError, match=r"^SLURM_STEP_TASKS_PER_NODE='2.*[:;] set it to the tasks per host"):
        rank_from_env({**ENVIRONMENTS["srun"], "SLURM_STEP_TASKS_PER_NODE": tasks})


def test_rendezvous_is_read_back() -> None:
    rank = Rank(rank=3, world_size=4, local_rank=1, local_world_size=2, convention="env")
    env = rendezvous(rank, "n1", 29500)
    assert rank_from_env(env) == rank
    assert (env["MASTER_ADDR"], env["MASTER_PORT"]) == ("n1", "29500")


VALUES = st.sampled_from(
    ["0", "1", "2", "4", "", "-1", "x", "\u00b2", "\u0663", "9" * 5000, "2(x2)", "2(x999999999)", "(", "1.5"]
)
SRUN = ("SLURM_PROCID", "SLURM_STEP_ID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_NODEID")
NAMES = [
    *(name for each in LAUNCHER_VARIABLES for name in each.rank_names),
    *SRUN,
    "SLURM_STEP_TASKS_PER_NODE",
    "PMIX_RANK",
    "PMI_LOCAL_SIZE",
    "PALS_NODEID",
]


@given(st.dictionaries(st.sampled_from(NAMES), VALUES))
def test_any_environment_is_a_rank_or_refused(env: dict[str, str]) -> None:
    try:
        rank = rank_from_env(env)
    except InputError:
        return
    assert rank is None or 0 <= rank.rank < rank.world_size
    assert local_rank_of(env) is None or local_rank_of(env) >= 0


@given(st.text(max_size=40) | st.text("0129(x),", max_size=20))
def test_any_text_is_tasks_per_node_or_refused(text: str) -> None:
    try:
        counts = tasks_per_node({"SLURM_TASKS_PER_NODE": text}, "SLURM_TASKS_PER_NODE")
    except InputError:
        return
    assert len(counts) <= MAX_RANKS
