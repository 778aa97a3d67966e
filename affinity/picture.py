"""Plan -> text."""

from string import ascii_uppercase

from affinity.cpuset import format_list
from affinity.machine import Core, Machine
from affinity.plan import Plan

CELLS_PER_LINE = 24
COMM, LOADER, IDLE = "~", "*", "."
GIB = 1 << 30


def picture(plan: Plan) -> str:
    """The host as one cell per core, each worker a letter, then workers, environment, reasons and warnings."""
    parts = [_headline(plan.machine), _map(plan), _workers(plan), _environment(plan), _reasons(plan)]
    return "\n\n".join(part for part in parts if part)


def _headline(machine: Machine) -> str:
    isa = f" ({', '.join(machine.isa)})" if machine.isa else ""
    lent = "" if machine.allowed_pus == machine.pus else f", {len(machine.allowed_pus)} of them lent to this process"
    return (
        f"{machine.name}: {machine.model}{isa}\n"
        f"{len(machine.packages)} package(s), {len(machine.numa_nodes)} NUMA node(s), "
        f"{len(machine.cores)} cores, {len(machine.pus)} PUs{lent}"
    )


def _map(plan: Plan) -> str:
    mark: dict[int, str] = {}
    for worker in plan.workers:
        letter = ascii_uppercase[worker.local_rank % 26]
        mark |= dict.fromkeys(worker.compute_pus, letter + letter)
        mark |= dict.fromkeys(worker.comm_pus, letter + COMM)
        mark |= dict.fromkeys(worker.loader_pus, letter + LOADER)

    def cell(core: Core) -> str:
        return next((mark[pu] for pu in core.pus if pu in mark), IDLE * 2)

    memory = {node.id: node.memory_bytes for node in plan.machine.numa_nodes}
    blocks: dict[tuple[int, int | None], list[str]] = {}
    for core in plan.machine.cores:
        blocks.setdefault((core.package, core.numa_node), []).append(cell(core))
    lines = []
    for (package, node), cells in blocks.items():
        size = memory.get(-1 if node is None else node, 0)
        room = f", {size / GIB:.0f} GiB" if size else ""
        lines.append(f"package {package}, NUMA node {'none' if node is None else node}{room}")
        lines += ["  " + " ".join(cells[i : i + CELLS_PER_LINE]).rstrip() for i in range(0, len(cells), CELLS_PER_LINE)]
    for memory_only in plan.machine.numa_nodes:
        if not memory_only.pus:
            near = ", ".join(map(str, memory_only.near)) or "none"
            amount = f"{memory_only.memory_bytes / GIB:.0f} GiB"
            lines.append(f"NUMA node {memory_only.id}: {amount} of {memory_only.kind} memory, next to node {near}")
    lines.append(
        f"  one cell a core; AA: computes for worker A, A{COMM}: communicates, A{LOADER}: loads, {IDLE * 2}: idle"
    )
    return "\n".join(lines)


def _workers(plan: Plan) -> str:
    lines = ["worker  compute PUs   comm    loader  intra-op  inter-op  memory"]
    for w in plan.workers:
        policy = f"{w.memory_policy} {format_list(w.memory_nodes)}".strip()
        lines.append(
            f"{w.local_rank:>2} {ascii_uppercase[w.local_rank % 26]}    {format_list(w.compute_pus):<13} "
            f"{format_list(w.comm_pus) or 'shared':<7} {format_list(w.loader_pus) or 'shared':<7} "
            f"{w.intra_op:<9} {w.inter_op:<9} {policy}"
        )
    lines += [f"unused PUs {format_list(item.pus)}: {item.why}" for item in plan.unused]
    return "\n".join(lines)


def _environment(plan: Plan) -> str:
    """Each variable once where all workers agree on it, else worker by worker."""
    lines = ["environment"]
    for name, value in plan.workers[0].env:
        values = [dict(worker.env).get(name, "") for worker in plan.workers]
        if len(set(values)) == 1:
            lines.append(f"  {name}={value}")
        else:
            lines += [f"  worker {i}: {name}={v}" for i, v in enumerate(values)]
    return "\n".join(lines)


def _reasons(plan: Plan) -> str:
    width = max(len(reason.what) for reason in plan.reasons)
    lines = ["why"] + [f"  {reason.what:<{width}}  {reason.value}: {reason.why}" for reason in plan.reasons]
    return "\n".join(lines + [f"warning: {text}" for text in plan.warnings])
