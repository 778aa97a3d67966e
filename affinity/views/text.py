"""Plan -> text."""

from textwrap import TextWrapper

from affinity.errors import Wording, as_field
from affinity.planner.plan import Plan
from affinity.planner.reasons import Reason
from affinity.text_table import align_columns
from affinity.topology.cpuset import format_list
from affinity.topology.machine import Core, Machine
from affinity.units import memory_text
from affinity.views.explain import alternatives, figures
from affinity.views.legend import color, legend, letter, roles, sign
from affinity.wording import counted

WIDTH = 80


def plan_to_text(plan: Plan, *, colored: bool = False, explained: bool = False, wording: Wording = as_field) -> str:
    """The host as one cell per core and one character per PU, then workers, environment, reasons and warnings.

    `explained` adds the plans for other numbers of workers, and the figures that the rules go by.
    `wording` spells the settings that its texts name.
    """
    plan = plan.worded(wording)
    parts = [_headline(plan.machine), _map(plan, colored), _workers(plan), _environment(plan), _reasons(plan)]
    if explained:
        parts += [
            "other numbers of workers\n" + _indented(align_columns(alternatives(plan, wording)).splitlines()),
            _listed("figures that the rules go by", figures(plan)),
        ]
    return "\n\n".join(part for part in parts if part)


def _headline(machine: Machine) -> str:
    isa = f" ({', '.join(machine.isa)})" if machine.isa else ""
    limit = (
        "" if machine.allowed_pus == machine.pus else f", {len(machine.allowed_pus)} of them available to this process"
    )
    return (
        f"{machine.name}: {machine.model}{isa}\n"
        f"{counted(len(machine.packages), 'package')}, {counted(len(machine.numa_nodes), 'NUMA node')}, "
        f"{counted(len(machine.cores), 'core')}, {counted(len(machine.pus), 'CPU')}{limit}"
    )


def _map(plan: Plan, colored: bool) -> str:
    does = roles(plan)

    def cell(core: Core) -> str:
        """One character per PU; in color where the core has a worker."""
        text = "".join(sign(*does[pu]) for pu in core.pus)
        owner = next((rank for _, rank in map(does.__getitem__, core.pus) if rank is not None), None)
        return text if owner is None or not colored else f"{_ansi(color(owner))}{text}\x1b[0m"

    memory = {node.id: node.memory_bytes for node in plan.machine.numa_nodes}
    blocks: dict[tuple[int, int | None], list[str]] = {}
    for core in plan.machine.cores:
        blocks.setdefault((core.package, core.numa_node), []).append(cell(core))
    threads = max(len(core.pus) for core in plan.machine.cores)
    per_line = max(4, (WIDTH - 2) // (threads + 1) // 4 * 4)
    lines = []
    for (package, node), cells in blocks.items():
        size = memory.get(-1 if node is None else node, 0)
        room = f", {memory_text(size)}" if size else ""
        lines.append(f"package {package}, NUMA node {'none' if node is None else node}{room}")
        lines += ["  " + " ".join(cells[i : i + per_line]).rstrip() for i in range(0, len(cells), per_line)]
    for memory_only in plan.machine.numa_nodes:
        if not memory_only.pus:
            near = ", ".join(map(str, memory_only.near)) or "none"
            kind = f"{memory_text(memory_only.memory_bytes)} of {memory_only.kind} memory"
            lines.append(f"NUMA node {memory_only.id}: {kind}, next to node {near}")
    lines.append(f"  one sign per CPU; {legend(plan, ',')}, ~: communicates, *: loads, .: idle")
    return "\n".join(lines)


def _ansi(color: str) -> str:
    red, green, blue = (int(color[i : i + 2], 16) for i in (1, 3, 5))
    return f"\x1b[30;48;2;{red};{green};{blue}m"


def _workers(plan: Plan) -> str:
    heads = ("worker", "compute CPUs", "comm", "loader", "intra-op", "inter-op", "batch", "memory")
    rows: list[tuple[str, ...]] = [heads]
    for w in plan.workers:
        rows.append(
            (
                f"{w.local_rank} {letter(w.local_rank)}",
                format_list(w.compute_pus),
                format_list(w.comm_pus) or "shared",
                format_list(w.loader_pus) or "shared",
                str(w.intra_op),
                str(w.inter_op),
                "" if w.local_batch is None else str(w.local_batch),
                f"{w.memory_policy} {format_list(w.memory_nodes)}".strip(),
            )
        )
    lines = align_columns(rows).splitlines()
    lines += [_folded(f"unused CPUs {format_list(item.pus)}: {item.why}") for item in plan.unused]
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
    return "\n".join([_listed("why", plan.reasons), *(_folded(f"warning: {text}") for text in plan.warnings)])


def _listed(title: str, reasons: tuple[Reason, ...]) -> str:
    width = max((len(reason.what) for reason in reasons), default=0)
    lines = (_folded(f"  {r.what:<{width}}  {r.value}: {r.why}", width + 4) for r in reasons)
    return "\n".join([title, *lines])


def _folded(text: str, indent: int = 2) -> str:
    """Text in lines of at most WIDTH letters, later ones indented; paths and CPU lists stay whole, to be copied."""
    start = len(text) - len(text.lstrip())
    wrapper = TextWrapper(WIDTH, break_long_words=False, break_on_hyphens=False)
    wrapper.initial_indent, wrapper.subsequent_indent = " " * start, " " * indent
    return wrapper.fill(text.lstrip())


def _indented(lines: list[str]) -> str:
    return "\n".join(f"  {line}" for line in lines)
