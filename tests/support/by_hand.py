"""Ranks of a plan, each started as a launcher on a cluster would: any number of ranks on any number of cores."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from cputrain.mpi.supervise.run import free_port
from tests.support.ccl_jobs import started
from tests.support.commands import here
from tests.support.forked import ended

PIPES = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}


def plan_of(place: Path, *arguments: str) -> dict:
    """Return the plan that `cputrain plan ARGUMENTS` makes for this machine."""
    planned = here("plan", *arguments, "--format", "json", cwd=place)
    assert planned.returncode == 0, planned.stderr
    return json.loads(planned.stdout)


def ranks_by_hand(place: Path, plan: dict, *arguments: str) -> list[subprocess.CompletedProcess[str]]:
    """Run `cputrain ARGUMENTS` as all ranks of a plan, with its workers bound by the plan."""
    (place / "plan.json").write_text(json.dumps(plan))
    size = str(len(plan["workers"]))
    bind = [sys.executable, "-m", "cputrain.affinity.bind", "--plan", "plan.json", "--no-verify", "--"]
    argv = [*bind, sys.executable, "-m", "cputrain", *arguments, "--no-verify"]
    common = {"WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    ranks = [
        subprocess.Popen(argv, cwd=place, env={**os.environ, **common, "RANK": str(i), "LOCAL_RANK": str(i)}, **PIPES)
        for i in range(int(size))
    ]
    outputs = [rank.communicate(timeout=300) for rank in ranks]
    return [subprocess.CompletedProcess(argv, r.returncode, *texts) for r, texts in zip(ranks, outputs, strict=True)]


def ranks_of_code(code: str, count: int = 2) -> list[Any]:
    """Run `count` Python processes as ranks on this host; return the last line of each, parsed as JSON."""
    with started("-c", code, ranks=count, GLOO_SOCKET_IFNAME="lo") as ranks:
        return [json.loads(ended(rank, 200).out.splitlines()[-1]) for rank in ranks]
