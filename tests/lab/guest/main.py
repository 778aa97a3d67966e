"""Run in a guest: every check of one topology, in one process. The results are /mnt/results.json.

python -m tests.lab.guest.main TOPOLOGY
"""

import json
import platform
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

from cputrain.affinity.planner.plan_file import plan_to_dict
from tests.lab.guest import binding, limits, planned, readers
from tests.lab.guest.scene import NotApplicableError, Scene, set_scene
from tests.lab.topologies import TOPOLOGIES

RESULTS = Path("/mnt/results.json")
CHECKS: dict[str, Callable[[Scene], None]] = {
    "topology read right": readers.as_emulated,
    "lscpu": readers.lscpu,
    "numactl": readers.numactl,
    "lstopo": readers.lstopo,
    "kinds of memory": readers.memory_kinds,
    "workers": planned.workers,
    "domains": planned.domains,
    "near-equal threads": planned.even_workers,
    "memory": planned.memory,
    "binding obeyed": binding.workers,
    "report agrees": binding.shown_as_planned,
    "taskset": binding.moved_by_taskset,
    "migratepages": binding.moved_by_migratepages,
    "foreign plan refused": binding.plan_of_another_machine,
    "offline": binding.taken_offline,
    "cpuset": limits.cpuset,
    "shrunk cpuset": limits.shrunk_cpuset,
    "quotas": limits.quotas,
}


def main(topology: str) -> int:
    """Run the checks; each one's problem is "" where it holds, None where the topology has nothing to check."""
    print(f"{time.clock_gettime(time.CLOCK_BOOTTIME):6.1f} s  up", flush=True)
    scene = set_scene(TOPOLOGIES[topology])
    problems: dict[str, str | None] = {}
    for name, check in CHECKS.items():
        started = time.monotonic()
        try:
            check(scene)
        except NotApplicableError:
            problems[name] = None
        except Exception as error:  # noqa: BLE001  every check reports
            place = traceback.extract_tb(error.__traceback__)[-1]
            problems[name] = f"{type(error).__name__} in {place.name}, line {place.lineno}: {error}"[:2000]
        else:
            problems[name] = ""
        print(f"{time.monotonic() - started:6.1f} s  {name}: {shown(problems[name])}", flush=True)
    RESULTS.write_text(
        json.dumps({"problems": problems, "release": platform.release(), "plan": plan_to_dict(scene.plan)}),
        encoding="utf-8",
    )
    return 0


def shown(problem: str | None) -> str:
    """A check's result as a line of the console."""
    return "has nothing to check" if problem is None else problem[:300] or "holds"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
