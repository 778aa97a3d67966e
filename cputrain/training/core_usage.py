"""Use of a rank's cores by itself and by others, from the kernel's counters."""

import os
import resource
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

from cputrain.affinity.binding import threads_of
from cputrain.affinity.topology.machine import parse_list

STEAL = 7  # field of a line in /proc/stat: user nice system idle iowait irq softirq steal guest guest_nice
WAITING = (3, 4)  # fields idle and iowait


@dataclass(frozen=True, slots=True, kw_only=True)
class CoreUse:
    """Use of a rank's PUs. `steal` and `others` are shares (0 to 1) of their CPU time, taken by the hypervisor and by
    other processes, including those on SMT siblings. `mhz` is the mean clock, 0 if unknown; `faults_per_s` are major
    page faults a second. `left` is the number of PUs that the rank's threads have lost or gained since the start.
    """

    steal: float
    others: float
    mhz: float
    faults_per_s: float
    left: float


@dataclass(frozen=True, slots=True, kw_only=True)
class _Counters:
    at: float
    busy_s: float
    steal_s: float
    own_s: float
    faults: int


class CoreUsage:
    """Measures the use of PUs by this process and by others since `restart`."""

    def __init__(self, pus: Collection[int], root: Path = Path("/")) -> None:
        self._root, self._pus = root, sorted(pus)
        self._siblings = {sibling for pu in pus for sibling in self._threads_of_core(pu)}
        self._bound = _bound_threads()
        self.restart()

    def restart(self) -> None:
        """Start to count from now."""
        self._before = self._read()

    def since_restart(self) -> CoreUse:
        """Return the use since the last restart."""
        before, now = self._before, self._read()
        seconds = max(now.at - before.at, 1e-9)
        pus_s = len(self._pus) * seconds
        others_s = (now.busy_s - before.busy_s) - (now.own_s - before.own_s)
        return CoreUse(
            steal=max(0.0, now.steal_s - before.steal_s) / pus_s,
            others=max(0.0, others_s) / pus_s,
            mhz=self._mhz(),
            faults_per_s=(now.faults - before.faults) / seconds,
            left=float(len(pus_left(self._bound, _bound_threads(), self._pus))),
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
            busy += sum(ticks[:STEAL]) - sum(ticks[i] for i in WAITING)  # user includes guest
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


def _bound_threads() -> dict[int, tuple[int, ...]]:
    return {thread.tid: thread.pus for thread in threads_of(os.getpid())}


def pus_left(
    before: Mapping[int, tuple[int, ...]], now: Mapping[int, tuple[int, ...]], planned: Collection[int]
) -> set[int]:
    """Return the PUs by which a process has left the planned ones: PUs of which a living thread had one before and that
    no thread may use now, and others that none could use before. `before` and `now` map threads to their PUs."""
    here = {pu for pus in now.values() for pu in pus}
    lost = {pu for tid, pus in before.items() if tid in now for pu in pus} - here
    return (lost & {*planned}) | (here - {*planned} - {pu for pus in before.values() for pu in pus})
