"""Published practice by name: the values of a request that a profile sets where the user sets none."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from affinity.topology.machine import Machine

TWO_WORKERS_A_PACKAGE = 28  # cores; the 24 of a Xeon 8160 stayed one worker
FEWEST_CORES_WITH_SERVERS = 8  # with fewer, two comm cores would be more than a quarter of a worker


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """A source to cite, and the request fields that it sets for a machine and the requested ppn, if any."""

    source: str
    decide: Callable[[Machine, int | None], dict[str, Any]]


def is_phi(machine: Machine) -> bool:
    """Whether the machine is a Xeon Phi."""
    return "Xeon Phi" in machine.model or "Xeon(R) Phi" in machine.model


def _bkm_2018(machine: Machine, ppn: int | None) -> dict[str, Any]:
    """Workers by package or quadrant, two communication servers each (Phi: four); the other cores compute."""
    packages, cores = len({core.package for core in machine.allowed_cores}), len(machine.allowed_cores)
    nodes = len({core.numa_node for core in machine.allowed_cores})
    a_package = 4 if is_phi(machine) else 2 if cores // packages >= TWO_WORKERS_A_PACKAGE else 1
    ppn = ppn or min(cores, max(nodes, packages * a_package))
    servers = 4 if is_phi(machine) else 2
    large = cores // ppn >= FEWEST_CORES_WITH_SERVERS
    return {
        "ppn": ppn,
        "comm_cores": servers if large else 0,
        "loader_cores": 0,
        "inter_op": 2 if large else 1,
        "comm_threads": servers if large else 0,
        "reserve_last": True,
        "openmp": "libiomp5",  # TensorFlow with MKL: KMP_AFFINITY=granularity=fine,compact,1,0, KMP_BLOCKTIME=1
    }


def _mlperf_spr(machine: Machine, ppn: int | None) -> dict[str, Any]:
    """One worker a package; eight communication threads on the second threads of cores that compute."""
    ppn = ppn or len({core.package for core in machine.allowed_cores})
    spare = len(machine.allowed_cores) // ppn > 1
    has_siblings = all(len(core.pus) > 1 for core in machine.allowed_cores)
    siblings = max(0, min(8, len(machine.allowed_cores) // ppn - 1)) if has_siblings else 0
    return {
        "ppn": ppn,
        "comm_cores": 0,
        "loader_cores": 1 if spare else 0,
        "comm_siblings": siblings,
        "comm_threads": siblings,
    }


PROFILES = {
    "auto": Profile(source="the planner's own rules", decide=lambda machine, ppn: {}),
    "bkm-2018": Profile(
        source="Intel's best known methods of 2018 for several workers per node; Intel Caffe; SURFsara-Intel 2018, "
        "256 hosts",
        decide=_bkm_2018,
    ),
    "mlperf-spr": Profile(source="Intel's MLPerf v2.1 submission on Sapphire Rapids", decide=_mlperf_spr),
}
