"""PyTorch trains on an emulated SNC-2 host; two emulated hosts run one launch over a network of their own."""

import json
import shlex
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from cputrain.affinity.planner.plan_file import read_plan
from cputrain.affinity.topology.machine import parse_list
from cputrain.runs.events import read_events
from tests.lab import boot
from tests.lab.topologies import Topology, even
from tests.support.fake_hosts import write_ssh_files

pytestmark = pytest.mark.slow
PYTHON = shlex.quote(sys.executable)
STEPS = 3
LENET = (
    *("large-batch-mnist", "data.path=synthetic", "data.train_images=64", "batch.local=4", "plan.ppn=2"),
    *("comm.backend=gloo", "data.decoder=pillow"),  # compiling oneCCL's backend or the decoder takes minutes here
    *(f"max_steps={STEPS}", "output=/mnt/run"),
)
SNC2 = Topology(cores=4, nodes=even(2, 4, mib=1280), distances=((10, 12), (12, 10)), workers=(2, 2))
TWO_NODES = Topology(sockets=2, cores=2, nodes=even(2, 4), workers=(2, 2))
RANK = """
import json, os, socket
mask = sorted(os.sched_getaffinity(0))
found = {"host": socket.gethostname(), "local_rank": int(os.environ["LOCAL_RANK"]), "mask": mask}
with open(f"/mnt/rank-{os.environ['RANK']}.json", "w") as file:
    json.dump(found, file)
"""


@pytest.fixture(scope="module", autouse=True)
def _compiled() -> None:
    """Compile what the guests import."""
    boot.compile_modules("cputrain.cli.train", "cputrain.cli.launch", "cputrain.training.trainer", "torch.distributed")


def test_two_workers_train_lenet_on_snc2(tmp_path: Path) -> None:
    """The trainer itself checks each OpenMP thread and the nodes of its first large allocation, and fails otherwise."""
    command = f"{PYTHON} -m cputrain train {' '.join(LENET)}"
    boot.run(boot.Guest(topology=SNC2, kernel="newer", command=command, exchange=tmp_path))
    run = tmp_path / "run"
    end = read_events(run)[-1]
    assert (end["event"], end["steps"]) == ("end", STEPS), end
    plan = read_plan(run / "plan.json")
    assert len(plan.workers) == 2
    assert all(worker.memory_policy != "default" for worker in plan.workers)


@pytest.mark.parametrize("kernel", ["newer"])
def test_two_hosts_run_one_launch(tmp_path: Path, kernel: str) -> None:
    """MPICH starts the ranks of both hosts by ssh; each rank compares its host with the plan, and has its mask."""
    mpich = boot.ROOT / ".mpi/mpich/bin"
    if not mpich.is_dir():
        pytest.skip(reason="needs MPICH: make mpi")
    folder = tmp_path / "ssh"
    write_ssh_files(folder, ["h1", "h2"], 1)
    (tmp_path / "rank.py").write_text(RANK)
    with tempfile.TemporaryDirectory(prefix="lab") as sockets, ThreadPoolExecutor(2) as pool:
        first, second = (
            boot.Guest(
                topology=TWO_NODES,
                kernel=kernel,
                command=f"{_host(number, folder)}; {work}",
                exchange=tmp_path,
                name=f"h{number}",
                more=_cable(Path(sockets), number),
            )
            for number, work in ((1, _launch(folder, mpich)), (2, "until [ -e /mnt/done ]; do sleep 1; done"))
        )
        other = pool.submit(boot.run, second)
        try:
            boot.run(first)
        finally:
            (tmp_path / "done").touch()
        other.result()
    ranks = [json.loads((tmp_path / f"rank-{rank}.json").read_text()) for rank in range(4)]
    assert [(rank["host"], rank["local_rank"]) for rank in ranks] == [("h1", 0), ("h1", 1), ("h2", 0), ("h2", 1)]
    workers = read_plan(tmp_path / "run/plan.json").workers
    assert [tuple(rank["mask"]) for rank in ranks] == [worker.pus for worker in workers] * 2
    assert {pu for worker in workers for pu in worker.pus} <= {*parse_list("0-3")}


def _host(number: int, folder: Path) -> str:
    """Give the guest its name, its address, the other's address, and an sshd."""
    return (
        f"hostname h{number}; mount --bind {folder}/hosts /etc/hosts; mkdir /run/sshd; ip link set eth0 up; "
        f"ip addr add 10.78.1.{number}/24 dev eth0; /usr/sbin/sshd -f {folder}/sshd_config"
    )


def _launch(folder: Path, mpich: Path) -> str:
    """Wait for the other host's sshd, then launch two ranks on each host. An emulated host may need longer than the
    pre-flight waits for an answer."""
    options = "--launcher mpich --hosts h1,h2 --ppn 2 --output /mnt/run --no-preflight"
    return (
        f"until {folder}/ssh h2 true; do sleep 1; done; export PATH={mpich}:$PATH HYDRA_LAUNCHER_EXEC={folder}/ssh; "
        f"{PYTHON} -m cputrain launch {options} -- {PYTHON} /mnt/rank.py"
    )


def _cable(sockets: Path, number: int) -> tuple[str, ...]:
    """A network card whose packets go to the other guest."""
    own, other = sockets / f"h{number}", sockets / f"h{3 - number}"
    ends = f"local.type=unix,local.path={own},remote.type=unix,remote.path={other}"
    return (
        *("-netdev", f"dgram,id=lan,{ends}"),
        *("-device", f"virtio-net-pci,netdev=lan,mac=52:54:00:00:00:0{number}"),
    )
