"""Layout of the drawing of packages: one row per layer of a top package, with rows ordered for short lines."""

from statistics import fmean

import networkx as nx

PASSES = 8  # over the rows; graphs of this size have converged by then


def inner_imports(graph: dict[str, set[str]], top: str) -> nx.DiGraph:
    """Return the imports between the packages inside a top package, without the imports of its own files."""
    inside = sorted(name for name in graph if name.startswith(f"{top}."))
    imports = nx.DiGraph()
    imports.add_nodes_from(inside)
    imports.add_edges_from((name, other) for name in inside for other in sorted(graph[name]) if other in inside)
    return imports


def imports_all(imports: nx.DiGraph, name: str) -> bool:
    """Return whether a package imports all the others, as a command line does."""
    return len(imports[name]) == len(imports) - 1


def rows_of(imports: nx.DiGraph) -> list[list[str]]:
    """Return rows from the top. A package is in the row below its lowest importer, except importers of everything;
    without such an importer it is right above the packages that it imports.
    """
    height: dict[str, int] = {}
    for name in reversed(list(nx.topological_sort(imports))):
        height[name] = 1 + max((height[other] for other in imports[name]), default=-1)
    for name in nx.topological_sort(imports):
        importers = [height[one] for one in imports.predecessors(name) if not imports_all(imports, one)]
        height[name] = min(importers) - 1 if importers else height[name]
    rows = [[name for name in imports if height[name] == level] for level in range(max(height.values()), -1, -1)]
    lines = nx.transitive_reduction(imports)
    lines.remove_nodes_from([name for name in imports if imports_all(imports, name)])
    return _ordered(rows, lines.to_undirected())


def _ordered(rows: list[list[str]], lines: nx.Graph) -> list[list[str]]:
    """Sort each row by the mean place of its packages' neighbors (barycenter heuristic, Sugiyama et al. 1981)."""
    for _ in range(PASSES):
        place = {name: i - len(row) / 2 for row in rows for i, name in enumerate(row)}
        for row in rows:
            row.sort(key=lambda name: fmean([place[one] for one in lines.adj.get(name, ())] or [place[name]]))
            place |= {name: i - len(row) / 2 for i, name in enumerate(row)}
    return rows
