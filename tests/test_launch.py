from pathlib import Path

from affinity.catalog import find_machine
from affinity.plan import Request, plan_machine
from affinity.runtime import Runtime
from mpi.job import Job
from mpi.launch import bound, intelmpi, local


def job(nodes: int, **changes) -> Job:
    plan = plan_machine(find_machine("skx-8160-2s"), Request(ppn=2, nodes=nodes), Runtime())
    hosts = tuple(f"n{i}" for i in range(nodes))
    fields = {"plan": plan, "hosts": hosts, "command": ("python", "a b.py"), "plan_path": Path("p.json")}
    return Job(**{**fields, "log_dir": Path("logs"), **changes})


def test_local_workers_meet_on_loopback() -> None:
    started = local(job(1), 4321)
    assert [env["RANK"] for _, env in started] == ["0", "1"]
    assert all(env["WORLD_SIZE"] == env["LOCAL_WORLD_SIZE"] == "2" for _, env in started)
    assert all((env["MASTER_ADDR"], env["MASTER_PORT"]) == ("127.0.0.1", "4321") for _, env in started)
    assert all(argv[-2:] == ("python", "a b.py") for argv, _ in started)


def test_intelmpi_starts_every_rank_and_binds_none() -> None:
    argv = intelmpi(job(256))
    assert argv[:5] == ("mpirun", "-np", "512", "-ppn", "2")
    assert argv[argv.index("I_MPI_PIN") + 1] == "0"
    assert argv[argv.index("MASTER_ADDR") + 1] == "n0"
    assert argv[-2:] == ("python", "a b.py")


def test_no_verify_reaches_the_rank() -> None:
    assert "--no-verify" in bound(job(1, verify=False))
    assert "--no-verify" not in bound(job(1))
    assert "--keep-env" in bound(job(1, keep_env=True))
