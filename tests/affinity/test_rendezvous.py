"""The address at which ranks meet without communication, and the names by which scripts find their rank."""

import socket

import pytest

from cputrain.affinity.errors import InputError, RunError
from cputrain.affinity.rank import LOOPBACK, MASTER_PORT, Rank, rank_from_env, rendezvous_address, with_rank

SPREAD = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[003,1-2]-ib,m1"}
STEP = {"SLURM_STEP_ID": "0", "SLURM_STEP_NODELIST": "n2,n3"}


def rank(number: int, *, size: int = 4, on_host: int = 4) -> Rank:
    fields = {"local_rank": number % on_host, "local_world_size": on_host, "convention": "test"}
    return Rank(rank=number, world_size=size, **fields)


def test_what_is_set_is_kept() -> None:
    env = {"MASTER_ADDR": "n1", "MASTER_PORT": "1234", "GLOO_SOCKET_IFNAME": "ib0", "CCL_WORKER_COUNT": "2"}
    assert rendezvous_address(rank(0), env) == ("n1", 1234)
    assert env.items() <= with_rank(rank(0), env).items()
    for wrong in ("http", "0", "65536", ""):
        with pytest.raises(InputError, match=f"MASTER_PORT={wrong} is not a TCP port"):
            rendezvous_address(rank(0), {"MASTER_PORT": wrong})


def test_ranks_of_one_job_find_one_port_and_other_jobs_another() -> None:
    jobs = [
        {"I_MPI_HYDRA_UUID": "2c210000-529f"},
        {"PMIX_NAMESPACE": "prterun-n1-8510@1"},
        {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "1"},
        {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "2"},
    ]
    places = [{rendezvous_address(rank(i), job) for i in range(1, 4)} for job in jobs]
    assert all(len(place) == 1 for place in places)
    assert len(set.union(*places)) == len(jobs)
    assert all(address == LOOPBACK and 20_000 <= port < 30_000 for address, port in set.union(*places))
    assert rendezvous_address(rank(1), {}) == (LOOPBACK, MASTER_PORT)


def test_the_first_host_of_a_list_with_several_ranges() -> None:
    for nodes, first in (("rack[0-1]_blade[03-4],m1", "rack0_blade03"), ("n[1][2]", "n12"), ("a.b.,n[1-2]", "a.b.")):
        assert rendezvous_address(rank(1, on_host=2), {"SLURM_JOB_NODELIST": nodes})[0] == first


def test_slurm_s_first_host_is_rank_0_s() -> None:
    assert rendezvous_address(rank(3, on_host=2), SPREAD)[0] == "n003-ib"
    assert rendezvous_address(rank(3, on_host=2), {**SPREAD, **STEP})[0] == "n2"
    with pytest.raises(InputError, match=r"host of rank 0 is unknown: set MASTER_ADDR .* cputrain launch --hosts"):
        rendezvous_address(rank(3, on_host=2), {})


@pytest.mark.parametrize("listed", ["n[1-", "n]1", "n[a],m", "n[]", ",n1"])
@pytest.mark.parametrize("variable", ["SLURM_JOB_NODELIST", "SLURM_STEP_NODELIST"])
def test_a_damaged_list_of_slurm_is_named_with_its_variable(variable: str, listed: str) -> None:
    env = {**SPREAD, "SLURM_STEP_ID": "0", variable: listed}
    with pytest.raises(InputError, match=rf"^{variable}='.* does not begin with a host: set MASTER_ADDR to the name"):
        rendezvous_address(rank(3, on_host=2), env)


def test_rank_0_refuses_where_the_ranks_cannot_meet() -> None:
    with pytest.raises(InputError, match=rf"rank 0 runs on {socket.gethostname()}, not on 192.0.2.9"):
        rendezvous_address(rank(0, on_host=2), {"SLURM_JOB_NODELIST": "192.0.2.9"})
    with pytest.raises(InputError, match=r"nowhere\.invalid, the first host of SLURM_JOB_NODELIST, has no address"):
        rendezvous_address(rank(0, on_host=2), {"SLURM_JOB_NODELIST": "nowhere.invalid"})
    job = {"PMIX_NAMESPACE": "taken"}
    _, port = rendezvous_address(rank(1), job)
    for listens in (LOOPBACK, "0.0.0.0"):
        with socket.create_server((listens, port)):
            for env in (job, {**job, "MASTER_ADDR": socket.gethostname()}):
                with pytest.raises(RunError, match=f"port {port} of .* is in use: set MASTER_PORT"):
                    rendezvous_address(rank(0), env)
    with socket.create_server((LOOPBACK, port)):
        assert rendezvous_address(rank(1), job) == (LOOPBACK, port)  # rank 0 itself may listen there already
    assert rendezvous_address(rank(0), job) == (LOOPBACK, port)


def test_a_rank_has_the_same_numbers_by_every_name() -> None:
    env = with_rank(rank(3, on_host=2), {"MASTER_ADDR": "localhost", "SLURM_PROCID": "0", "SLURM_NTASKS": "1"})
    for names in (
        ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
        ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_NTASKS_PER_NODE"),
        *(("OMPI_COMM_WORLD_" + name for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")),),
    ):
        assert [env[name] for name in names] == ["3", "4", "1", "2"]
    assert [env[name] for name in ("SLURM_NODEID", "NODE_RANK", "GROUP_RANK")] == ["1"] * 3
    found = rank_from_env(env)
    assert found is not None and (found.rank, found.local_world_size) == (3, 2)


def test_a_connection_to_another_job_s_pmi_is_not_handed_on() -> None:
    shell = {"PMI_RANK": "0", "PMI_SIZE": "1", "PMI_FD": "9", "PMI_PORT": "n1:1"}  # srun --mpi=pmi2 --pty bash
    assert not {"PMI_FD", "PMI_PORT"} & with_rank(rank(0), shell).keys()
    own = {**shell, "PMI_SIZE": "4"}
    assert own.items() <= with_rank(rank(0), own).items()
