"""Plan -> SVG: packages hold NUMA nodes, nodes hold cores, cores show their PUs; workers by color and letter."""

from html import escape
from textwrap import wrap

from affinity.errors import Wording, as_field
from affinity.planner.plan import Plan
from affinity.topology.machine import Core
from affinity.units import memory_text
from affinity.views.legend import COMM, COMPUTE, IDLE, LOADER, SHARED, color, legend, letter, roles, sign

CELL, GAP, COLUMNS, LINE = 26, 4, 24, 16  # pixels; cores a row; pixels between lines of text
STRENGTH = {COMPUTE: 1.0, SHARED: 1.0, COMM: 0.45, LOADER: 0.45, IDLE: 0.0}
LETTERS_PER_LINE, LETTERS_PER_BOLD_LINE = 110, 95


def plan_to_svg(plan: Plan, *, wording: Wording = as_field) -> str:
    """A picture of the host for any browser, with the workers and the reasons below; `wording` spells settings."""
    plan = plan.worded(wording)
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
    for node_only in (node for node in plan.machine.numa_nodes if not node.pus):
        near = ", ".join(map(str, node_only.near)) or "none"
        size = f"{memory_text(node_only.memory_bytes)} of {node_only.kind} memory"
        y = _text(parts, GAP, y, f"NUMA node {node_only.id}: {size}, next to node {near}")
    y = _text(parts, GAP, y, f"{legend(plan, ';')}; ~: communicates; *: loads images; .: idle", bold=True)
    for worker in plan.workers:
        parts.append(_rect(GAP, y + 3, 12, 12, fill=color(worker.local_rank)))
        threads = f"{worker.intra_op} intra-op, {worker.inter_op} inter-op threads"
        nodes_used = ",".join(map(str, worker.memory_nodes))
        line = f"worker {worker.local_rank} {letter(worker.local_rank)}: {threads}, memory {worker.memory_policy}"
        batch = "" if worker.local_batch is None else f", {worker.local_batch} images per step"
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
    """A square of as many stripes as the core has PUs."""
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
            f'text-anchor="middle">{escape(sign(role, rank), quote=False)}<title>CPU {pu}: {role}</title></text>'
        )
    parts.append(_rect(x, y, CELL, CELL, fill="none", stroke="#444"))
    return parts


def _rect(
    x: float, y: float, width: float, height: float, *, fill: str, stroke: str = "none", opacity: float = 1
) -> str:
    alpha = "" if opacity == 1 else f' fill-opacity="{opacity:g}"'
    return f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" fill="{fill}"{alpha} stroke="{stroke}"/>'


def _text(parts: list[str], x: float, y: int, text: str, *, bold: bool = False) -> int:
    """Add a line of text below y; returns where the next one goes."""
    weight = ' font-weight="bold"' if bold else ""
    parts.append(f'<text x="{x:g}" y="{y + LINE - 4}"{weight}>{escape(text, quote=False)}</text>')
    return y + LINE
