"""The packages and their imports as SVG: a band for each top package, a row for each layer of it."""

from html import escape
from itertools import pairwise

from site_pages.imports import TOP

BOX_WIDTH, BOX_HEIGHT = 108, 30
GAP_X, GAP_Y = 22, 30
MARGIN, TITLE = 24, 96
COLORS = {"cputrain": "#dbe9f6", "mpi": "#e2f0d9", "affinity": "#fdebd0"}

Point = tuple[float, float]


def drawing(graph: dict[str, set[str]]) -> str:
    """SVG of the packages: an importer stands above what it imports, and lines that follow from others are left out.

    Imports of another top package are drawn as one arrow between the bands; a pair of packages that import each
    other, against the layers, is joined by a dashed red line.
    """
    bands = {top: _layers(_band(graph, top)) for top in TOP}
    columns = max(len(row) for rows in bands.values() for row in rows)
    width = TITLE + columns * (BOX_WIDTH + GAP_X) + MARGIN
    places: dict[str, Point] = {}
    parts: list[str] = []
    y = float(MARGIN)
    for top, rows in bands.items():
        height = len(rows) * (BOX_HEIGHT + GAP_Y) - GAP_Y + 2 * MARGIN
        parts.append(f'<rect x="8" y="{y:g}" width="{width - 16}" height="{height}" rx="8" fill="{COLORS[top]}"/>')
        parts.append(f'<text x="22" y="{y + height / 2 + 5:g}" font-weight="bold">{top}</text>')
        for i, row in enumerate(rows):
            left = TITLE + (columns - len(row)) * (BOX_WIDTH + GAP_X) / 2
            for j, name in enumerate(row):
                places[name] = (left + j * (BOX_WIDTH + GAP_X), y + MARGIN + i * (BOX_HEIGHT + GAP_Y))
        y += height + GAP_Y
    parts += [_arrow(places, bands, pair) for pair in pairwise(TOP)]
    parts += [_line(places, a, b, mutual=a in graph[b]) for a, b in _direct(graph) if a in places and b in places]
    parts += [_box(name, place) for name, place in places.items()]
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {y - GAP_Y + MARGIN:g}" '
        'font-family="sans-serif" font-size="14" fill="#222222">\n'
        "<title>Packages of cputrain and their imports</title>\n"
        f'<rect width="{width}" height="{y - GAP_Y + MARGIN:g}" fill="#ffffff"/>\n'
    )
    return head + "\n".join(parts) + "\n</svg>\n"


def _band(graph: dict[str, set[str]], top: str) -> dict[str, set[str]]:
    """The part of the graph that is inside a top package."""
    inside = {name for name in graph if name.startswith(f"{top}.")}
    return {name: graph[name] & inside for name in inside}


def _layers(graph: dict[str, set[str]]) -> list[list[str]]:
    """Rows from the top: every package stands above all that it imports, as far as no two import each other."""
    depth: dict[str, int] = {}

    def measure(name: str, above: tuple[str, ...]) -> int:
        if name not in depth:
            below = [measure(other, (*above, name)) for other in sorted(graph[name]) if other not in (*above, name)]
            depth[name] = 1 + max(below, default=-1)
        return depth[name]

    for name in sorted(graph):
        measure(name, ())
    rows = [[name for name in sorted(graph) if depth[name] == d] for d in range(max(depth.values()) + 1)]
    return rows[::-1]


def _direct(graph: dict[str, set[str]]) -> list[tuple[str, str]]:
    """The imports inside a top package that do not follow from others."""
    pairs = []
    for name, imported in sorted(graph.items()):
        inner = {other for other in imported if other.split(".")[0] == name.split(".")[0] and "." in other}
        for other in sorted(inner):
            mutual = name in graph[other]
            if mutual or not any(_reaches(graph, between, other, {name}) for between in inner - {other}):
                pairs.append((name, other))
    return pairs


def _reaches(graph: dict[str, set[str]], start: str, end: str, avoided: set[str]) -> bool:
    found, seen = [start], set(avoided)
    while found:
        name = found.pop()
        if name == end:
            return True
        if name not in seen:
            seen.add(name)
            found += graph[name]
    return False


def _box(name: str, place: Point) -> str:
    x, y = place
    label = escape(name.partition(".")[2])
    return (
        f'<rect x="{x:g}" y="{y:g}" width="{BOX_WIDTH}" height="{BOX_HEIGHT}" rx="5" fill="#ffffff" stroke="#555555"/>'
        f'<text x="{x + BOX_WIDTH / 2:g}" y="{y + BOX_HEIGHT / 2 + 5:g}" text-anchor="middle">{label}</text>'
    )


def _line(places: dict[str, Point], importer: str, imported: str, *, mutual: bool) -> str:
    """A curve from the importer's lower edge to the imported package's upper one."""
    (x1, y1), (x2, y2) = places[importer], places[imported]
    a, b = x1 + BOX_WIDTH / 2, x2 + BOX_WIDTH / 2
    start, end = y1 + BOX_HEIGHT, y2
    bend = GAP_Y * 0.8
    look = 'stroke="#cc2222" stroke-dasharray="4 3"' if mutual else 'stroke="#777777"'
    return f'<path d="M{a:g},{start:g} C{a:g},{start + bend:g} {b:g},{end - bend:g} {b:g},{end:g}" fill="none" {look}/>'


def _arrow(places: dict[str, Point], bands: dict[str, list[list[str]]], pair: tuple[str, str]) -> str:
    """The thick arrow from a band to the next one below it."""
    upper, lower = pair
    start = max(places[name][1] for row in bands[upper] for name in row) + BOX_HEIGHT + MARGIN
    end = min(places[name][1] for row in bands[lower] for name in row) - MARGIN
    return (
        f'<path d="M50,{start + 4:g} V{end - 12:g}" stroke="#333333" stroke-width="4"/>'
        f'<path d="M42,{end - 14:g} h16 l-8,12 z" fill="#333333"/>'
        f'<text x="66" y="{(start + end) / 2 + 5:g}" font-size="12">imports</text>'
    )
