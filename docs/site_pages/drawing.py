"""SVG drawing of the packages and their imports: a band for each top package, a row for each of its layers."""

from html import escape
from itertools import pairwise

import networkx as nx

from site_pages.imports import TOP
from site_pages.layers import imports_all, inner_imports, rows_of

BOX_WIDTH, BOX_HEIGHT = 124, 30
GAP_X, GAP_Y = 22, 30
MARGIN, TITLE = 24, 96
COLORS = {"cputrain": "#dbe9f6", "mpi": "#e2f0d9", "affinity": "#fdebd0"}

Point = tuple[float, float]


def drawing(graph: dict[str, set[str]]) -> str:
    """Return the SVG. An importer is above the packages that it imports; lines implied by others are left out.

    A package that imports all others of its top package is a bar above them, without lines. Imports of another top
    package are one arrow between the bands. Raises networkx.HasACycle if packages import each other.
    """
    inside = {top: inner_imports(graph, top) for top in TOP}
    bands = {top: rows_of(imports) for top, imports in inside.items()}
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
    for imports in inside.values():
        direct = sorted(nx.transitive_reduction(imports).edges)
        parts += [_line(places[a], places[b]) for a, b in direct if not imports_all(imports, a)]
        for name in imports:
            x, y_box = places[name]
            bar = imports_all(imports, name)
            parts.append(_box(name, (TITLE if bar else x, y_box), width - TITLE - MARGIN if bar else BOX_WIDTH))
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {y - GAP_Y + MARGIN:g}" '
        'font-family="sans-serif" font-size="14" fill="#222222">\n'
        "<title>Packages of cputrain and their imports</title>\n"
        f'<rect width="{width}" height="{y - GAP_Y + MARGIN:g}" fill="#ffffff"/>\n'
    )
    return head + "\n".join(parts) + "\n</svg>"


def _box(name: str, place: Point, width: float) -> str:
    x, y = place
    label = escape(name.partition(".")[2])
    return (
        f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{BOX_HEIGHT}" rx="5" fill="#ffffff" stroke="#555555"/>'
        f'<text x="{x + width / 2:g}" y="{y + BOX_HEIGHT / 2 + 5:g}" text-anchor="middle">{label}</text>'
    )


def _line(importer: Point, imported: Point) -> str:
    """Return a curve from the lower edge of the importer to the upper edge of the imported package."""
    a, b = importer[0] + BOX_WIDTH / 2, imported[0] + BOX_WIDTH / 2
    start, end = importer[1] + BOX_HEIGHT, imported[1]
    bend = GAP_Y * 0.8
    curve = f"M{a:g},{start:g} C{a:g},{start + bend:g} {b:g},{end - bend:g} {b:g},{end:g}"
    return f'<path d="{curve}" fill="none" stroke="#777777"/>'


def _arrow(places: dict[str, Point], bands: dict[str, list[list[str]]], pair: tuple[str, str]) -> str:
    """Return the thick arrow from a band to the one below."""
    upper, lower = pair
    start = max(places[name][1] for row in bands[upper] for name in row) + BOX_HEIGHT + MARGIN
    end = min(places[name][1] for row in bands[lower] for name in row) - MARGIN
    return (
        f'<path d="M50,{start + 4:g} V{end - 12:g}" stroke="#333333" stroke-width="4"/>'
        f'<path d="M42,{end - 14:g} h16 l-8,12 z" fill="#333333"/>'
        f'<text x="66" y="{(start + end) / 2 + 5:g}" font-size="12">imports</text>'
    )
