"""Resource use of ranks and hosts: records merged and bounded, sampled from real processes, shown in the report."""

import io
import json
import os
import signal
import subprocess
import sys
import time
from functools import reduce
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from cputrain.mpi import usage
from cputrain.mpi.supervise.run import run_local
from cputrain.mpi.usage import (
    MAX_INTERFACES,
    MAX_RECORDS,
    HostUse,
    Tree,
    UsageFile,
    WorkerUse,
    from_line,
    host_file,
    merge_records,
    merged,
    moved,
    read_rdma,
    read_tree,
    read_usage_records,
    sum_networks,
    to_line,
    worker_file,
)
from cputrain.report.page import write_report
from cputrain.report.run import mean_of, read_usage, running_time, worker_table
from tests.mpi.test_local import job
from tests.support.commands import HANGS_S, cputrain, here, mpi_path, needs_two_cores

MIB = 1 << 20
WORKER = WorkerUse(time=0.0, seconds=1.0, host="n1", cpu_s=0.5, rss_bytes=MIB, processes=1)
HOST = HostUse(time=0.0, seconds=1.0, cpu_s=1.5, memory_available_bytes=MIB, network={"eth0": (10, 20)})
# Rank 0 sends 64 MiB to itself over the loopback and computes; rank 1's child holds 200 MiB, idle, until it is sampled.
BUSY_AND_IDLE = """
import json, os, socket, subprocess, sys, threading, time
if os.environ["RANK"] == "1":
    child = subprocess.Popen([sys.executable, "-c", "x = bytearray(200 << 20); input()"], stdin=subprocess.PIPE)
    sampled, given_s = False, time.monotonic() + 120
    while not sampled and time.monotonic() < given_s:
        time.sleep(0.2)
        with open("out/usage/rank-1.jsonl", "rb") as file:
            records = [json.loads(line) for line in file if line.endswith(b"\\n")]
        sampled = any(record["processes"] == 2 and record["rss_bytes"] > 200 << 20 for record in records)
    child.communicate(b"\\n")
    sys.exit(child.returncode)
server = socket.create_server(("127.0.0.1", 0))
sender = socket.create_connection(server.getsockname())
receiver, _ = server.accept()
threading.Thread(target=lambda: [sender.sendall(bytes(1 << 20)) for _ in range(64)], daemon=True).start()
left = 64 << 20
while left:
    left -= len(receiver.recv(min(left, 1 << 20)))
while time.process_time() < 1.2:
    pass
"""

seconds = st.floats(0.5, 100).map(lambda value: round(value, 3))
counts = st.integers(0, 1 << 40)
networks = st.dictionaries(st.sampled_from([f"if{i}" for i in range(20)]), st.tuples(counts, counts), max_size=12)
hosts = st.builds(
    HostUse, time=seconds, seconds=seconds, cpu_s=seconds, memory_available_bytes=counts, network=networks
)
workers = st.builds(
    WorkerUse, time=seconds, seconds=seconds, host=st.text(), cpu_s=seconds, rss_bytes=counts, processes=counts
)


@given(st.lists(workers, max_size=60), st.integers(2, 20))
def test_thinned_records_are_few_and_lose_no_second_and_no_peak(records: list[WorkerUse], most: int) -> None:
    thin = merge_records(records, most)
    assert len(thin) <= most // 2 + 1
    for field in ("seconds", "cpu_s"):
        assert sum(getattr(r, field) for r in thin) == pytest.approx(sum(getattr(r, field) for r in records))
    assert max((r.rss_bytes for r in thin), default=0) == max((r.rss_bytes for r in records), default=0)
    assert [r.time for r in thin[-1:]] == [r.time for r in records[-1:]]


@pytest.mark.slow
@given(st.lists(hosts, min_size=2, max_size=30))
def test_a_merged_host_keeps_its_busiest_interfaces_and_its_least_memory(records: list[HostUse]) -> None:
    whole = reduce(merged, records)
    assert len(whole.network) <= MAX_INTERFACES
    assert whole.memory_available_bytes == min(r.memory_available_bytes for r in records)
    both = sum_networks(records[0].network, records[1].network)
    kept = merged(*records[:2]).network
    left_out = [sum(both[name]) for name in both.keys() - kept.keys()]
    assert all(both[name] == moved for name, moved in kept.items())
    assert max(left_out, default=0) <= min((sum(moved) for moved in kept.values()), default=0)


@given(workers, hosts)
def test_records_are_lines_of_json(worker: WorkerUse, host: HostUse) -> None:
    assert from_line(to_line(worker), WorkerUse) == worker
    assert from_line(to_line(host), HostUse) == host
    assert to_line(host).count(b"\n") == 1
    for line in (to_line(worker), to_line(host)[:-3], b"5"):
        with pytest.raises(ValueError):
            from_line(line, HostUse)


@pytest.mark.parametrize(
    "line",
    [
        b'{"time": 1e999, "seconds": 1, "cpu_s": 1, "memory_available_bytes": 1, "network": {}}',
        b'{"time": 1, "seconds": 1, "cpu_s": NaN, "memory_available_bytes": 1, "network": {}}',
        b'{"time": 1, "seconds": 1, "cpu_s": -1, "memory_available_bytes": 1, "network": {}}',
        b'{"time": 1, "seconds": 1, "cpu_s": true, "memory_available_bytes": 1, "network": {}}',
        b'{"time": 1, "seconds": 1, "cpu_s": 1, "memory_available_bytes": null, "network": {}}',
        b'{"time": 1, "seconds": 1, "cpu_s": 1, "memory_available_bytes": 1, "network": {"eth0": [1e999, 1]}}',
        b'{"time": 1, "seconds": 1, "cpu_s": 1, "memory_available_bytes": 1, "network": {"eth0": [1, 2, 3]}}',
        b'{"time": 1, "seconds": 1, "cpu_s": 1, "memory_available_bytes": 1, "network": 5}',
    ],
)
def test_damaged_records_are_refused(line: bytes) -> None:
    with pytest.raises(ValueError):
        from_line(line, HostUse)


def test_counters_become_bytes_moved() -> None:
    before = {"eth0": (100, 50), "idle": (7, 7), "set back": (9, 9)}
    after = {"eth0": (300, 50), "idle": (7, 7), "set back": (1, 20), "new": (5, 5)}
    assert moved(before, after) == {"eth0": (200, 0)}


def test_a_file_stays_bounded_however_long_the_run(tmp_path: Path) -> None:
    file, path = UsageFile(tmp_path / "usage/rank-0.jsonl", WorkerUse), tmp_path / "usage/rank-0.jsonl"
    for i in range(1, 5001):
        file.add(replace(WORKER, time=float(i), rss_bytes=(2 if i == 1234 else 1) * MIB))
        assert i % 100 or len(read_usage_records(path, WorkerUse)) <= MAX_RECORDS
    file.close()
    records = read_usage_records(path, WorkerUse)
    assert MAX_RECORDS / 4 < len(records) <= MAX_RECORDS
    assert sum(r.seconds for r in records) == 5000 and records[-1].time == 5000
    assert next(r.time for r in records if r.rss_bytes == 2 * MIB) == pytest.approx(1234, abs=20)
    assert path.stat().st_size < 200 * MAX_RECORDS
    assert [other.name for other in path.parent.iterdir()] == [path.name]


def test_a_resumed_run_appends_also_after_a_line_cut_short(tmp_path: Path) -> None:
    path = tmp_path / "rank-0.jsonl"
    path.write_bytes(to_line(WORKER) + to_line(WORKER)[:20])
    file = UsageFile(path, WorkerUse)
    file.add(replace(WORKER, time=5.0))
    file.add(replace(WORKER, time=5.1, seconds=0.01, cpu_s=0.02))  # so short that its rate would be noise
    file.close()
    assert read_usage_records(path, WorkerUse) == [WORKER, replace(WORKER, time=5.1, seconds=1.01, cpu_s=0.52)]


def test_rdma_ports_are_counted_in_words_of_four_bytes(tmp_path: Path) -> None:
    for device, received in (("hfi1_0", "10\n"), ("mlx5_0", "N/A (no PMA)\n")):
        counters = tmp_path / f"sys/class/infiniband/{device}/ports/1/counters"
        counters.mkdir(parents=True)
        (counters / "port_rcv_data").write_text(received)
        (counters / "port_xmit_data").write_text("20\n")
    assert read_rdma(tmp_path) == {"hfi1_0:1 (RDMA)": (40, 80)}


@pytest.mark.parametrize("listed", [True, False])
def test_a_process_is_read_with_all_below_it(listed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(usage, "CHILDREN_LISTED", listed)
    # A quarter of a second: /proc rounds user and system time down to hundredths each.
    burn = "import os, time\nwhile time.process_time() < 0.25: pass\nos.write(1, b'x'); time.sleep(60)"
    tree = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {burn!r}])"
    with subprocess.Popen([sys.executable, "-c", tree], stdout=subprocess.PIPE, start_new_session=True) as process:
        assert process.stdout is not None and process.stdout.read(1) == b"x"
        found = read_tree(process.pid)
        os.killpg(process.pid, signal.SIGKILL)
    assert found.processes == 2 and found.cpu_s >= 0.2 and found.rss_bytes > 4 * MIB
    assert read_tree(process.pid) == Tree()


@needs_two_cores
@pytest.mark.parametrize("launcher", ["local", pytest.param("openmpi", marks=pytest.mark.long)])
def test_a_launched_command_s_use_is_sampled_and_reported(launcher: str, tmp_path: Path) -> None:
    (tmp_path / "work.py").write_text(BUSY_AND_IDLE)
    path = {} if launcher == "local" else mpi_path(launcher)
    command = ("--launcher", launcher, "--ppn", "2", "--output", "out", "--", sys.executable, "work.py")
    launched = cputrain("launch", *command, cwd=tmp_path, **path)
    assert launched.returncode == 0, launched.stderr
    usage = read_usage(tmp_path / "out")
    assert usage is not None and len(usage.hosts) == 1
    busy, idle = usage.workers[0], usage.workers[1]
    assert 1.1 <= sum(r.cpu_s for r in busy) <= 1.2 * sum(r.seconds for r in busy)  # read in ticks of 10 ms
    assert sum(r.cpu_s for r in idle) < 2.4  # with the starts of two interpreters
    assert max(r.rss_bytes for r in idle) > 200 * MIB and max(r.processes for r in idle) == 2
    assert max(r.rss_bytes for r in busy) < 200 * MIB and max(r.processes for r in busy) == 1
    (whole,) = usage.hosts.values()
    assert sum(r.network["lo"][0] for r in whole if "lo" in r.network) >= 64 * MIB
    assert sum(r.cpu_s for r in whole) >= 0.9 * sum(r.cpu_s for r in busy)
    assert [cells[4] for cells in worker_table(usage).cells[1:]] == ["1", "1"]
    reported = here("report", "out", cwd=tmp_path)
    assert reported.returncode == 0, reported.stderr
    html = (tmp_path / "out/report.html").read_text()
    assert "Resource use" in html and "CPU per worker" in html and "lo (loopback)" in html and "Epochs" not in html


@pytest.mark.slow
@pytest.mark.parametrize("late_s", [0.0, 1.0])
def test_a_command_of_a_moment_has_a_record_too(late_s: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # A busy host may read the command for the first time after it is over.
    monkeypatch.setattr(usage, "read_tree", lambda pid: (time.sleep(late_s), read_tree(pid))[1])
    burn = "import time\nwhile time.process_time() < 0.25: pass"
    assert run_local(job(tmp_path, burn), os.environ, io.StringIO(), io.StringIO()) == 0
    records = read_usage_records(worker_file(tmp_path / "usage", 0), WorkerUse)
    assert 0.2 < sum(r.cpu_s for r in records) < sum(r.seconds for r in records) + 0.02  # read in ticks of 10 ms
    (whole,) = (tmp_path / "usage").glob("host-*.jsonl")
    assert sum(r.cpu_s for r in read_usage_records(whole, HostUse)) >= 0.9 * sum(r.cpu_s for r in records)


@pytest.mark.slow
def test_a_run_goes_on_where_its_use_cannot_be_written(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "usage").write_text("a file")
    assert run_local(job(tmp_path, "import time; time.sleep(1.5)"), os.environ, io.StringIO(), io.StringIO()) == 0
    assert "the run continues without recording resource use" in caplog.text


def recorded(run: Path, ranks: int, times: list[float]) -> None:
    """A run of so many ranks on two hosts, with a record of a second before each time."""
    for rank in range(ranks):
        file = UsageFile(worker_file(run / "usage", rank), WorkerUse)
        for i, at in enumerate(times):
            file.add(replace(WORKER, time=at, cpu_s=float(i % 2), host=f"n{rank * 2 // ranks}"))
        file.close()
    for host in ("n0", "n1"):
        whole = UsageFile(host_file(run / "usage", host), HostUse)
        for at in times:
            whole.add(replace(HOST, time=at))
        whole.close()


@pytest.mark.parametrize("ranks", [2, 40])
def test_pauses_are_left_out_of_the_picture(ranks: int, tmp_path: Path) -> None:
    recorded(tmp_path, ranks, [1.0, 2.0, 3.0, 1001.0, 1002.0, 1003.0])
    usage = read_usage(tmp_path)
    assert usage is not None
    assert list(running_time(usage)([0.0, 2.5, 3.0, 500.0, 1000.0, 1002.5])) == [0.0, 2.5, 3.0, 3.0, 3.0, 5.5]
    assert mean_of(usage.workers[0], lambda r: r.cpu_s) == 0.5
    html = write_report(tmp_path).read_text()
    assert html.count("<tr>") == ranks + 1 + 3 + 3
    assert (f"{ranks} workers: highest" in html) == (ranks > 8)
    assert len(html) < 400_000


def test_a_folder_without_samples_says_so(tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text("name: x\n")
    (tmp_path / "events.jsonl").write_text(json.dumps({"event": "start", "time": 0.0, "bindings": []}) + "\n")
    assert "No resource use was recorded" in write_report(tmp_path).read_text()


UNREADABLE = """
import os, sys
from pathlib import Path
from cputrain.mpi import usage

def unreadable():
    raise PermissionError(13, "Permission denied", "/proc/stat")

usage.read_host = unreadable
samples = usage.Sampler(Path(sys.argv[1]), {0: os.getpid()}, whole_host=True)
samples.tick()
samples.ended(0)
samples.close()
"""


def test_a_counter_that_cannot_be_read_does_not_end_the_run(tmp_path: Path) -> None:
    """Users see one line on stderr."""
    argv = [sys.executable, "-c", UNREADABLE, str(tmp_path)]
    result = subprocess.run(argv, capture_output=True, text=True, timeout=HANGS_S, check=True)
    line = "cputrain: /proc/stat: Permission denied; the run continues without recording resource use\n"
    assert result.stderr == line
