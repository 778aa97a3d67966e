"""The store of a job's ranks: on one address only, and its control keys signed."""

import subprocess
import sys
import time
from contextlib import AbstractContextManager
from pathlib import Path

import psutil
import pytest
from torch._C._distributed_c10d import HashStore, TCPStore

from cputrain.affinity.errors import RunError
from cputrain.affinity.rank import Rank
from cputrain.comm.store import SignedKeys, connect_store
from cputrain.mpi.supervise.run import free_port
from cputrain.mpi.supervise.wire import TOKEN_VARIABLE
from cputrain.runs.events import read_events
from cputrain.training.signals import KEY
from tests.support.commands import PPN
from tests.support.forked import Forked, ended, forked, printed
from tests.support.images import write_images
from tests.support.trainings import LENET

JOIN = """
import os, signal, sys
from datetime import timedelta
from cputrain.affinity.errors import RunError
from cputrain.affinity.rank import Rank
from cputrain.comm.store import connect_store
rank = Rank(rank=int(sys.argv[1]), world_size=2, local_rank=int(sys.argv[1]), local_world_size=2, convention="env")
try:
    store = connect_store(rank, os.environ, timedelta(seconds=float(sys.argv[2])))
    print("joined", flush=True)
except RunError as error:
    print(error, flush=True)
else:
    signal.pause()
"""
ALONE = Rank(rank=0, world_size=1, local_rank=0, local_world_size=1, convention="env")


def listening(process: psutil.Process) -> set[tuple[str, int]]:
    """Addresses and ports at which a process listens."""
    return {one.laddr for one in process.net_connections("inet") if one.status == psutil.CONN_LISTEN}


def test_the_store_of_one_host_is_on_loopback_alone() -> None:
    before = listening(psutil.Process())
    port = free_port()
    store = connect_store(ALONE, {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)})
    store.set("a", "1")
    assert store.get("a") == b"1"
    assert listening(psutil.Process()) - before == {("127.0.0.1", port)}


def test_a_taken_port_is_named() -> None:
    port = free_port()
    env = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    first = connect_store(ALONE, env)
    with pytest.raises(RunError, match=f"cannot listen on 127.0.0.1:{port} \\(Address already in use"):
        connect_store(ALONE, env)
    del first


def rank_at(port: int, rank: int, token: str, seconds: float) -> AbstractContextManager[Forked]:
    """A rank of the job of that token, which waits so long for it."""
    place = {TOKEN_VARIABLE: token, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    return forked("-c", JOIN, str(rank), str(seconds), **place)


def until_joined(process: Forked) -> None:
    deadline = time.monotonic() + 240
    while printed(process)[0] != "joined\n":
        assert process.poll() is None and time.monotonic() < deadline, printed(process)
        time.sleep(0.05)


def test_a_rank_at_another_job_s_port_waits_for_its_own_job_and_names_the_port_in_the_end() -> None:
    port = free_port()
    with rank_at(port, 0, "a", 240) as other:
        until_joined(other)
        with rank_at(port, 1, "b", 240) as patient:
            with rank_at(port, 1, "b", 5) as hasty:
                line = f"127.0.0.1:{port} serves another job's store: set MASTER_PORT to a free port\n"
                assert ended(hasty, 240).out == line
            other.kill()
            other.wait(240)  # its port is in use until then
            with rank_at(port, 0, "b", 240) as own:
                until_joined(own)
                until_joined(patient)


def test_a_value_that_another_job_has_set_is_an_error_where_it_is_awaited() -> None:
    store = HashStore()
    SignedKeys(store, "a").set("facts", "x")
    with pytest.raises(RunError, match="the key facts in the job's store is another job's: set MASTER_PORT to a free"):
        SignedKeys(store, "b").read("facts")
    assert SignedKeys(store, "a").read("facts") == "x"
    SignedKeys(store, "a").set("start/problem", "x")
    with pytest.raises(RunError, match="the key start/problem in the job's store is another"):
        SignedKeys(store, "b").problem_of_any("start", "", ALONE)


def test_a_key_is_read_only_where_the_job_s_token_signed_it() -> None:
    store = HashStore()
    ours, stranger = SignedKeys(store, "token"), SignedKeys(store, "guess")
    assert ours.get(KEY) is None
    for forged in ("1", "0" * 64 + " 1", " ", "\u00e4 1"):
        store.set(KEY, forged)
        assert ours.get(KEY) is None
    stranger.set(KEY, "1")
    assert ours.get(KEY) is None
    ours.set("other", "1")
    store.set(KEY, store.get("other").decode())
    assert ours.get(KEY) is None  # signed for another key
    SignedKeys(store, "token", "attempt1").set(KEY, "1")
    store.set(f"attempt2/{KEY}", store.get(f"attempt1/{KEY}").decode())
    assert SignedKeys(store, "token", "attempt1").get(KEY) == "1"
    assert SignedKeys(store, "token", "attempt2").get(KEY) is None  # signed under another prefix
    ours.set(KEY, "17")
    assert SignedKeys(store, "token").get(KEY) == "17"


@pytest.mark.long
def test_a_stranger_at_the_store_of_a_training_does_not_stop_it(tmp_path: Path) -> None:
    """A real training on this host: all its processes listen on loopback, and a foreign last step is ignored."""
    write_images(tmp_path / "images", train=24, val=3)
    network = (*LENET, "comm.backend=gloo")
    settings = (f"data.path={tmp_path}/images", *network, "batch.local=2", "epochs=6", "schedule.warmup_epochs=0")
    argv = (sys.executable, "-m", "cputrain", "train", "imagefolder", *settings, f"plan.ppn={PPN}", "output=run")
    with subprocess.Popen(argv, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        addresses: set[str] = set()
        told = False
        whole = psutil.Process(process.pid)
        while process.poll() is None:
            for one in whole.children(recursive=True):
                try:
                    places, env = listening(one), one.environ()
                except psutil.Error:
                    continue
                addresses |= {place.ip for place in places}
                port = int(env.get("MASTER_PORT", 0))
                if not told and any(place.port == port for place in places):
                    TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False).set(KEY, "1")
                    told = True
            time.sleep(0.05)
        assert process.stdout is not None
        printed = process.stdout.read()
    assert process.returncode == 0, printed
    assert told and addresses and addresses <= {"127.0.0.1", "::1"}
    end = read_events(tmp_path / "run")[-1]
    assert (end["status"], end["images"]) == ("done", 6 * (72 // (2 * PPN)) * 2 * PPN), printed


SERVE = """
import sys
from cputrain.affinity.rank import Rank
from cputrain.comm.store import connect_store
rank = Rank(rank=0, world_size=2, local_rank=0, local_world_size=1, convention="env")
connect_store(rank, {"MASTER_ADDR": sys.argv[1], "MASTER_PORT": sys.argv[2]})
"""


@pytest.mark.parametrize(("address", "expected"), [("127.0.1.1", {"0.0.0.0", "::"}), ("192.0.2.7", {"0.0.0.0", "::"})])
def test_a_name_whose_address_others_may_not_reach_is_served_on_all(address: str, expected: set[str]) -> None:
    """Debian's 127.0.1.1 for the own name, and an address that is a proxy's: the other hosts come by another one."""
    port = free_port()
    with forked("-c", SERVE, address, str(port)) as process:
        deadline = time.monotonic() + 60
        found: set[str] = set()
        while not found and time.monotonic() < deadline:
            found = {ip for ip, number in listening(psutil.Process(process.pid)) if number == port}
            time.sleep(0.05)
    assert found and found <= expected
