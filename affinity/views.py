"""Show a plan as text, SVG or in a notebook, and the differences between two plans."""

from dataclasses import dataclass, fields, replace
from textwrap import fill, wrap

from cputrain.affinity.errors import InputError, Wording, as_field, describe_error
from cputrain.affinity.planner import layouts, memory, rules
from cputrain.affinity.planner.plan import Plan, WorkerPlan, plan_machine
from cputrain.affinity.planner.request import Reason
from cputrain.affinity.planner.workload import RESNET50
from cputrain.affinity.terminal import align_columns
from cputrain.affinity.topology.machine import Core, Machine, format_list, name_cpus
from cputrain.affinity.wording import memory_text, plural

COMPUTE, SHARED, COMM, LOADER, IDLE, FOREIGN = "compute", "shared", "comm", "loader", "idle", "foreign"
SIGNS = {SHARED: "+", COMM: "~", LOADER: "*", IDLE: ".", FOREIGN: " "}
# Okabe and Ito's palette for color-blind readers. Colors repeat after eight workers, letters after 52.
COLORS = ("#E69F00", "#56B4E9", "#009E73", "#F0E442", "#0072B2", "#D55E00", "#CC79A7", "#999999")

# All assumed or cited figures of the rules, with their sources.
FIGURES = (
    *layouts.WORKER_COUNT_FIGURES,
    *layouts.LAYOUT_FIGURES,
    *rules.RULE_FIGURES,
    *rules.CORE_RATE_FIGURES,
    *memory.MEMORY_FIGURES,
)

WIDTH = 80

CELL, GAP, COLUMNS, LINE = 26, 4, 24, 16  # pixels, pixels, cores per row, pixels between lines of text
STRENGTH = {COMPUTE: 1.0, SHARED: 1.0, COMM: 0.45, LOADER: 0.45, IDLE: 0.0}
LETTERS_PER_LINE, LETTERS_PER_BOLD_LINE = 110, 95


def roles(plan: Plan) -> dict[int, tuple[str, int | None]]:
    """Map every PU of the machine to (role, worker's local rank); foreign: not available to this process.

    A PU on which several workers compute is shared, with the rank of the first.
    """
    uses: dict[int, tuple[str, int | None]] = dict.fromkeys(plan.machine.pus, (FOREIGN, None))
    uses |= dict.fromkeys(plan.machine.allowed_pus, (IDLE, None))
    for worker in plan.workers:
        for pu in worker.compute_pus:
            _, first = uses[pu]
            uses[pu] = (COMPUTE, worker.local_rank) if first is None else (SHARED, first)
        uses |= dict.fromkeys(worker.comm_pus, (COMM, worker.local_rank))
        uses |= dict.fromkeys(worker.loader_pus, (LOADER, worker.local_rank))
    return uses


def legend(plan: Plan, separator: str) -> str:
    """Return the legend of compute PUs."""
    shared = f"{separator} {SIGNS[SHARED]}: computes for several workers" if plan.oversubscribed else ""
    return f"A: computes for worker A{shared}"


def letter(local_rank: int) -> str:
    """Return a worker's letter: A to Z, then a to z, then from A again."""
    return "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"[local_rank % 52]


def sign(role: str, local_rank: int | None) -> str:
    """Return the character for a PU with this role."""
    return letter(local_rank) if role == COMPUTE and local_rank is not None else SIGNS[role]


def color(local_rank: int) -> str:
    """Return a worker's color as #RRGGBB."""
    return COLORS[local_rank % len(COLORS)]


def alternatives(plan: Plan, wording: Wording = as_field) -> list[tuple[str, ...]]:
    """Return a table, with a header, of the plans for other numbers of workers, with their warnings and errors."""
    rows: list[tuple[str, ...]] = [("workers", "threads each", "comm", "loader", "memory", "")]
    for ppn in _candidates(plan):
        try:
            variant = plan
            if ppn != len(plan.workers):
                variant = plan_machine(plan.machine, replace(plan.request, ppn=ppn), plan.runtime, plan.measured)
            variant = variant.render(wording)
        except InputError as error:
            rows.append((str(ppn), "", "", "", "", f"impossible: {describe_error(error, wording)}"))
            continue
        threads = sorted({worker.intra_op for worker in variant.workers})
        first = variant.workers[0]
        notes = ["this plan"] if ppn == len(plan.workers) else []
        rows.append(
            (
                str(ppn),
                format_list(threads),
                str(sum(len(worker.comm_pus) for worker in variant.workers)),
                str(sum(len(worker.loader_pus) for worker in variant.workers)),
                first.memory_policy,
                "; ".join([*notes, *variant.warnings]),
            )
        )
    return rows


def _candidates(plan: Plan) -> list[int]:
    """List plausible numbers of workers, with the plan's own."""
    cores, current = plan.machine.allowed_cores, len(plan.workers)
    return sorted(
        number for number in layouts.plausible_workers(cores) | {current} if 1 <= number <= max(len(cores), current)
    )


def rule_figures(plan: Plan) -> tuple[Reason, ...]:
    """Return all figures that the rules use, with their sources: measured on this machine, else assumed or cited."""
    rates = rules.measured_figures(plan.request.workload or RESNET50, plan.measured)
    return tuple(rates.get(figure.what, figure) for figure in FIGURES)


def plan_to_text(plan: Plan, *, colored: bool = False, explained: bool = False, wording: Wording = as_field) -> str:
    """Show a plan as text: one cell per core, one character per PU; workers, environment, reasons and warnings.

    `explained` adds the plans for other numbers of workers, and the figures that the rules use. `wording` spells the
    settings in its texts.
    """
    plan = plan.render(wording)
    parts = [_headline(plan.machine), _map(plan, colored), _workers(plan), _environment(plan), _reasons(plan)]
    if explained:
        parts += [
            "other numbers of workers\n" + _indented(align_columns(alternatives(plan, wording)).splitlines()),
            _listed("figures that the rules use", rule_figures(plan)),
        ]
    return "\n\n".join(part for part in parts if part)


def processor_text(machine: Machine) -> str:
    """Return the processor's name and vector extensions: "AMD EPYC (avx2, avx512f)"."""
    return machine.model + (f" ({', '.join(machine.isa)})" if machine.isa else "")


def _headline(machine: Machine) -> str:
    limit = (
        "" if machine.allowed_pus == machine.pus else f", {len(machine.allowed_pus)} of them available to this process"
    )
    return f"{machine.name}: {processor_text(machine)}\n{', '.join(machine.counts)}{limit}"


def _without_pus(machine: Machine) -> list[str]:
    """Describe the NUMA nodes without PUs, a line each."""
    lines = []
    for node in machine.numa_nodes:
        if not node.pus:
            near = ", ".join(map(str, node.near)) or "none"
            size = f"{memory_text(node.memory_bytes)} of {node.kind} memory"
            lines.append(f"NUMA node {node.id}: {size}, next to node {near}")
    return lines


def _map(plan: Plan, colored: bool) -> str:
    does = roles(plan)

    def cell(core: Core) -> str:
        """One character per PU, in the color of the core's worker."""
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
    lines += _without_pus(plan.machine)
    lines.append(f"  one character per CPU; {legend(plan, ',')}, ~: communicates, *: loads, .: idle")
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
    lines += [_folded(f"unused {name_cpus(item.pus)}: {item.why}") for item in plan.unused]
    return "\n".join(lines)


def _environment(plan: Plan) -> str:
    """List each variable once if all workers have the same value, else for each worker."""
    lines = ["environment"]
    for name, value in plan.workers[0].env.items():
        values = [worker.env.get(name, "") for worker in plan.workers]
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
    """Wrap text at WIDTH characters with a hanging indent; paths and CPU lists stay whole, so they can be copied."""
    start = len(text) - len(text.lstrip())
    return fill(
        text.lstrip(),
        WIDTH,
        initial_indent=" " * start,
        subsequent_indent=" " * indent,
        break_long_words=False,
        break_on_hyphens=False,
    )


def _indented(lines: list[str]) -> str:
    return "\n".join(f"  {line}" for line in lines)


def plan_differences(a: Plan, b: Plan, *, wording: Wording = as_field) -> list[str]:
    """List the differences between two plans in lines; empty if they are the same."""
    a, b = a.render(wording), b.render(wording)
    lines = [
        f"machine {name}: {before} -> {after}"
        for name, before, after in (
            ("name", a.machine.name, b.machine.name),
            ("model", a.machine.model, b.machine.model),
            ("cores", len(a.machine.cores), len(b.machine.cores)),
            ("allowed CPUs", format_list(a.machine.allowed_pus), format_list(b.machine.allowed_pus)),
        )
        if before != after
    ]
    for rank in range(max(len(a.workers), len(b.workers))):
        if rank >= len(b.workers):
            lines.append(f"worker {rank}: removed")
        elif rank >= len(a.workers):
            worker = b.workers[rank]
            threads = plural(worker.intra_op, "thread")
            lines.append(f"worker {rank}: added on {name_cpus(worker.pus)} with {threads}")
        else:
            lines += [f"worker {rank} {line}" for line in _worker_differences(a.workers[rank], b.workers[rank])]
    before_unused = {item.why: format_list(item.pus) for item in a.unused}
    after_unused = {item.why: format_list(item.pus) for item in b.unused}
    lines += [f"unused CPUs {line}" for line in _changes(before_unused, after_unused)]
    lines += _reason_differences(a.reasons, b.reasons)
    lines += [f"warning removed: {text}" for text in a.warnings if text not in b.warnings]
    lines += [f"warning added: {text}" for text in b.warnings if text not in a.warnings]
    return lines


def _worker_differences(a: WorkerPlan, b: WorkerPlan) -> list[str]:
    lines = []
    for field in fields(WorkerPlan):
        before, after = getattr(a, field.name), getattr(b, field.name)
        if field.name == "env":
            lines += _changes(dict(before), dict(after))
        elif before != after:
            shown = (format_list(v) or "none" if isinstance(v, tuple) else v for v in (before, after))
            lines.append("{}: {} -> {}".format(field.name, *shown))
    return lines


def _reason_differences(a: tuple[Reason, ...], b: tuple[Reason, ...]) -> list[str]:
    """List the decisions that changed, with the new reason."""
    before, after = _values(a), _values(b)
    why = {reason.what: reason.why for reason in b}
    changed = (what for what in dict.fromkeys((*before, *after)) if before.get(what) != after.get(what))
    return [
        f"{what}: {before.get(what, 'none')} -> {after.get(what, 'none')}" + (f" ({why[what]})" if what in why else "")
        for what in changed
    ]


def _values(reasons: tuple[Reason, ...]) -> dict[str, str]:
    """Map each decision to its value, or to the values of several workers, joined."""
    values: dict[str, str] = {}
    for reason in reasons:
        values[reason.what] = f"{values[reason.what]}, {reason.value}" if reason.what in values else reason.value
    return values


def _changes(before: dict[str, str], after: dict[str, str]) -> list[str]:
    return [
        f"{name}: {before.get(name, 'none')} -> {after.get(name, 'none')}"
        for name in dict.fromkeys((*before, *after))
        if before.get(name) != after.get(name)
    ]


def plan_to_svg(plan: Plan, *, wording: Wording = as_field) -> str:
    """Draw the host with its workers and the reasons as SVG; `wording` spells the settings."""
    plan = plan.render(wording)
    does = roles(plan)
    nodes: dict[tuple[int, int | None], list[Core]] = {}
    for core in plan.machine.cores:
        nodes.setdefault((core.package, core.numa_node), []).append(core)
    memory = {node.id: f", {memory_text(node.memory_bytes)}" for node in plan.machine.numa_nodes if node.memory_bytes}
    width = 2 * GAP + COLUMNS * (CELL + GAP) + 2 * GAP
    parts: list[str] = []
    y = _text(parts, GAP, 0, f"{plan.machine.name}: {plan.machine.model}", bold=True)
    for (package, node), cores in nodes.items():
        title = f"package {package}, " + ("no NUMA node" if node is None else f"NUMA node {node}{memory.get(node, '')}")
        rows = -(-len(cores) // COLUMNS)
        height = LINE + GAP + rows * (CELL + GAP) + GAP
        parts.append(_rect(GAP, y, width - 2 * GAP, height, fill="#fff", stroke="#888"))
        _text(parts, 2 * GAP, y, title)
        for i, core in enumerate(cores):
            x = 2 * GAP + i % COLUMNS * (CELL + GAP)
            parts += _core(core, does, x, y + LINE + GAP + i // COLUMNS * (CELL + GAP))
        y += height + GAP
    for line in _without_pus(plan.machine):
        y = _text(parts, GAP, y, line)
    y = _text(parts, GAP, y, f"{legend(plan, ';')}; ~: communicates; *: loads images; .: idle", bold=True)
    for worker in plan.workers:
        parts.append(_rect(GAP, y + 3, 12, 12, fill=color(worker.local_rank)))
        threads = f"{worker.intra_op} intra-op, {worker.inter_op} inter-op threads"
        nodes_used = ",".join(map(str, worker.memory_nodes))
        line = f"worker {worker.local_rank} {letter(worker.local_rank)}: {threads}, memory {worker.memory_policy}"
        batch = "" if worker.local_batch is None else f", {plural(worker.local_batch, 'image')} per step"
        y = _text(parts, GAP + 18, y, f"{line} {nodes_used}".rstrip() + batch)
    for reason in plan.reasons:
        for line in wrap(f"{reason.what} {reason.value}: {reason.why}", LETTERS_PER_LINE):
            y = _text(parts, GAP, y, line)
    for warning in plan.warnings:
        for line in wrap(f"warning: {warning}", LETTERS_PER_BOLD_LINE):
            y = _text(parts, GAP, y, line, bold=True)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {y + GAP}" width="{width}" height="{y + GAP}" '
        f'font-family="sans-serif" font-size="12">\n<rect width="100%" height="100%" fill="#fff"/>\n'
        + "\n".join(parts)
        + "\n</svg>"
    )


def _core(core: Core, does: dict[int, tuple[str, int | None]], x: int, y: int) -> list[str]:
    """Draw a core as a square with a stripe for each PU."""
    stripe = CELL / len(core.pus)
    parts = []
    for i, pu in enumerate(core.pus):
        role, rank = does[pu]
        fill = "#eee" if rank is None else color(rank)
        opacity = 1.0 if rank is None else STRENGTH[role]
        parts.append(_rect(x, y + i * stripe, CELL, stripe, fill=fill, opacity=opacity))
        size = min(12, stripe)
        parts.append(
            f'<text x="{x + CELL / 2:g}" y="{y + (i + 0.5) * stripe + size / 3:g}" font-size="{size:g}" '
            f'text-anchor="middle">{_escape(sign(role, rank))}<title>CPU {pu}: {role}</title></text>'
        )
    parts.append(_rect(x, y, CELL, CELL, fill="none", stroke="#444"))
    return parts


def _rect(
    x: float, y: float, width: float, height: float, *, fill: str, stroke: str = "none", opacity: float = 1
) -> str:
    alpha = "" if opacity == 1 else f' fill-opacity="{opacity:g}"'
    return f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" fill="{fill}"{alpha} stroke="{stroke}"/>'


def _text(parts: list[str], x: float, y: int, text: str, *, bold: bool = False) -> int:
    """Add a line of text below y, and return the y of the next line."""
    weight = ' font-weight="bold"' if bold else ""
    parts.append(f'<text x="{x:g}" y="{y + LINE - 4}"{weight}>{_escape(text)}</text>')
    return y + LINE


def _escape(text: str) -> str:
    from html import escape  # texts need no table of HTML's entities

    return escape(text, quote=False)


@dataclass(frozen=True, slots=True)
class Picture:
    """A plan that notebooks show as SVG, as the last expression of a cell, and `print` shows as text."""

    plan: Plan

    def __str__(self) -> str:
        return plan_to_text(self.plan)

    def _repr_svg_(self) -> str:
        return plan_to_svg(self.plan)
