"""The role of each PU in a plan, and the letters and colors of the workers."""

from affinity.planner.plan import Plan
from affinity.units import GIB, MIB

COMPUTE, SHARED, COMM, LOADER, IDLE, FOREIGN = "compute", "shared", "comm", "loader", "idle", "foreign"
SIGNS = {SHARED: "+", COMM: "~", LOADER: "*", IDLE: ".", FOREIGN: " "}
# Okabe and Ito's colors, which color-blind readers can tell apart; more workers share colors, but not letters.
COLORS = ("#E69F00", "#56B4E9", "#009E73", "#F0E442", "#0072B2", "#D55E00", "#CC79A7", "#999999")


def roles(plan: Plan) -> dict[int, tuple[str, int | None]]:
    """PU -> (role, worker's local rank), for every PU of the machine; foreign: not available to this process.

    A PU on which several workers compute is shared, with the rank of the first.
    """
    found: dict[int, tuple[str, int | None]] = dict.fromkeys(plan.machine.pus, (FOREIGN, None))
    found |= dict.fromkeys(plan.machine.allowed_pus, (IDLE, None))
    for worker in plan.workers:
        for pu in worker.compute_pus:
            _, first = found[pu]
            found[pu] = (COMPUTE, worker.local_rank) if first is None else (SHARED, first)
        found |= dict.fromkeys(worker.comm_pus, (COMM, worker.local_rank))
        found |= dict.fromkeys(worker.loader_pus, (LOADER, worker.local_rank))
    return found


def legend(plan: Plan, separator: str) -> str:
    """The legend of compute PUs."""
    shared = f"{separator} {SIGNS[SHARED]}: computes for several workers" if plan.oversubscribed else ""
    return f"A: computes for worker A{shared}"


def amount(memory_bytes: int) -> str:
    """Memory as "64 GiB", "2.9 GiB" or "231 MiB"."""
    if memory_bytes >= 10 * GIB or memory_bytes % GIB == 0:
        return f"{memory_bytes / GIB:.0f} GiB"
    return f"{memory_bytes / GIB:.1f} GiB" if memory_bytes >= GIB else f"{memory_bytes / MIB:.0f} MiB"


def letter(local_rank: int) -> str:
    """A worker's letter: A to Z, then a to z, then from A again."""
    return "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"[local_rank % 52]


def sign(role: str, local_rank: int | None) -> str:
    """One character for a PU."""
    return letter(local_rank) if role == COMPUTE and local_rank is not None else SIGNS[role]


def color(local_rank: int) -> str:
    """A worker's color as #RRGGBB."""
    return COLORS[local_rank % len(COLORS)]
