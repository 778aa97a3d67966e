"""Who uses a rank's cores: the kernel's counters of CPU time, page faults and clock, between two moments."""

import os
import resource
import time
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from affinity.topology.cpuset import parse_list

STEAL = 7  # places in a line of /proc/stat: user nice system idle iowait irq softirq steal guest guest_nice
WAITING = (3, 4)  # idle, iowait


@dataclass(frozen=True, slots=True, kw_only=True)
class Used:
    """Shares, 0 to 1, of the CPU time of a rank's PUs: taken by the hypervisor, and by other processes, those on the
    other threads of its cores included; the mean clock in MHz, 0 if unknown; page faults that needed a disk, a second.
    """

    steal: float
    others: float
    mhz: float
    faults_per_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class _Counters:
    at: float
    busy_s: float
    steal_s: float
    own_s: float
    faults: int


class CoreUsage:
    """The use of PUs by this process and by others since `restart`."""

    def __init__(self, pus: Collection[int], root: Path = Path("/")) -> None:
        self._root, self._pus = root, sorted(pus)
        self._siblings = {sibling for pu in pus for sibling in self._threads_of_core(pu)}
        self.restart()

    def restart(self) -> None:
        """Count from now on."""
        self._before = self._read()

    def since_restart(self) -> Used:
        """What was used since then."""
        before, now = self._before, self._read()
        seconds = max(now.at - before.at, 1e-9)
        pus_s = len(self._pus) * seconds
        others_s = (now.busy_s - before.busy_s) - (now.own_s - before.own_s)
        return Used(
            steal=max(0.0, now.steal_s - before.steal_s) / pus_s,
            others=max(0.0, others_s) / pus_s,
            mhz=self._mhz(),
            faults_per_s=(now.faults - before.faults) / seconds,
        )

    def _read(self) -> _Counters:
        busy = steal = 0
        try:
            lines = (self._root / "proc/stat").read_text(encoding="utf-8").splitlines()
        except OSError:
            lines = []
        for line in lines:
            name, *fields = line.split()
            if not name.startswith("cpu") or not name[3:].isdigit() or int(name[3:]) not in self._siblings:
                continue
            ticks = [int(field) for field in fields]
            busy += sum(ticks[:STEAL]) - sum(ticks[i] for i in WAITING)  # guests' time is in user's, too
            steal += ticks[STEAL]
        tick_s = 1 / os.sysconf("SC_CLK_TCK")
        return _Counters(
            at=time.monotonic(),
            busy_s=busy * tick_s,
            steal_s=steal * tick_s,
            own_s=time.process_time(),
            faults=resource.getrusage(resource.RUSAGE_SELF).ru_majflt,
        )

    def _threads_of_core(self, pu: int) -> list[int]:
        try:
            text = (self._cpu(pu) / "topology/thread_siblings_list").read_text(encoding="utf-8")
        except OSError:
            return [pu]
        return [*parse_list(text.strip())]

    def _mhz(self) -> float:
        clocks = []
        for pu in self._pus:
            try:
                clocks.append(int((self._cpu(pu) / "cpufreq/scaling_cur_freq").read_text(encoding="utf-8")) / 1000)
            except (OSError, ValueError):
                return 0.0
        return sum(clocks) / len(clocks) if clocks else 0.0

    def _cpu(self, pu: int) -> Path:
        return self._root / f"sys/devices/system/cpu/cpu{pu}"
