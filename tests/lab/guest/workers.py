"""Workers of a plan, started by affinity.bind's own main in a forked child: a new interpreter takes seconds here."""

import json
import os
import re
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from cputrain.affinity import bind
from cputrain.affinity.planner.plan import Plan
from cputrain.affinity.planner.plan_file import plan_to_json

BYTECODE = f"pycache_prefix={sys.pycache_prefix}"  # -I ignores the environment
PROBE = (sys.executable, "-I", "-S", "-X", BYTECODE, str(Path(__file__).with_name("probe.py")))
POLL_S = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Started:
    """A child: its pid, the file that it writes its output to, the end of the pipe that it waits at."""

    pid: int
    output: Path
    waits_at: int

    def report(self) -> dict[str, Any]:
        """What the probe printed, once it has. Raises AssertionError with the child's output where it ended before."""
        while not (text := self.output.read_text()).startswith("{") or not text.endswith("\n"):
            ended, status = os.waitpid(self.pid, os.WNOHANG)
            assert ended == 0, f"the worker ended with status {os.waitstatus_to_exitcode(status)}: {text}"
            time.sleep(POLL_S)
        return json.loads(text.splitlines()[0])

    def end(self) -> tuple[int, str]:
        """Let the probe end; its exit status and all that it printed."""
        os.close(self.waits_at)
        with suppress(ChildProcessError):
            _, status = os.waitpid(self.pid, 0)
            return os.waitstatus_to_exitcode(status), self.output.read_text()
        return 0, self.output.read_text()


def start(name: str, work: Callable[[], int]) -> Started:
    """Fork a child that runs `work` and ends with its status; its output goes to a file."""
    output = Path(f"/run/{name}.out")
    file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.dup2(reader, 0)
        os.dup2(file, 1)
        os.dup2(file, 2)
        os.closerange(3, 64)
        try:
            status = work()
        except BaseException:  # noqa: BLE001  the child must end here
            traceback.print_exc()
            status = 99
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    os.close(file)
    os.close(reader)
    os.set_inheritable(writer, False)
    return Started(pid=pid, output=output, waits_at=writer)


def bound(plan: Plan, local_rank: int, *options: str, group: Path | None = None) -> Started:
    """Start a probe as a worker of a plan, in a control group where one is named."""
    file = Path(f"/run/plan-{abs(hash(plan))}.json")
    if not file.is_file():  # other workers may be reading it
        file.write_text(plan_to_json(plan), encoding="utf-8")

    def work() -> int:
        if group is not None:
            (group / "cgroup.procs").write_text("0")
        return bind.main(["--plan", str(file), "--local-rank", str(local_rank), *options, "--", *PROBE], os.environ)

    return start(f"worker-{local_rank}", work)


@contextmanager
def all_bound(plan: Plan, group: Path | None = None) -> Iterator[list[tuple[Started, dict[str, Any]]]]:
    """Every worker of a plan, running, with its report."""
    workers = [bound(plan, worker.local_rank, group=group) for worker in plan.workers]
    try:
        yield [(worker, worker.report()) for worker in workers]
    finally:
        for worker in workers:
            worker.end()


@cache
def running_workers(plan: Plan) -> list[tuple[Started, dict[str, Any]]]:
    """Every worker of a plan with its report; they run until the guest ends, for several checks."""
    workers = [bound(plan, worker.local_rank) for worker in plan.workers]
    return [(worker, worker.report()) for worker in workers]


def in_group(group: Path, work: Callable[[], Any]) -> Any:
    """The JSON value that `work` returns when it runs inside a control group, in a child of this process."""

    def child() -> int:
        (group / "cgroup.procs").write_text("0")
        print(json.dumps(work()))
        return 0

    status, output = start("in-group", child).end()
    assert status == 0, output
    return json.loads(output)


def nodes_of(mapping: str) -> dict[int, int]:
    """NUMA node -> pages, of a line of numa_maps."""
    return {int(node): int(count) for node, count in re.findall(r" N(\d+)=(\d+)", mapping)}
