"""Pages of the shipped recipes and the catalog of machines, from configs/."""

import yaml

from site_pages.imports import ROOT
from site_pages.text import code, table

RECIPES = """# Shipped recipes

`cputrain train NAME` takes any of these by name. The comment at the top of each has its source, the published or
expected result, and the derivation of its numbers for its hosts; a test repeats the derivation.
"""
MACHINES = """# Catalog of machines

`--machine NAME` takes any of these names, so that a cluster can be planned from a laptop. A form tells the number of
packages and how their memory is configured: `1s`, `2s`, ... packages; `snc2`, `snc4` NUMA nodes in each; `flat` or
`cache` where a package has HBM or MCDRAM. The files are in `configs/machines/`.
"""


def recipes() -> str:
    """Return the file of every recipe."""
    files = sorted((ROOT / "configs/recipes").glob("*.yaml"))
    parts = [
        f"## {path.stem}\n\n```{{literalinclude}} ../../configs/recipes/{path.name}\n:language: yaml\n```\n"
        for path in files
    ]
    return "\n".join([RECIPES, *parts])


def machines() -> str:
    """Return a row for each processor: model, forms, source."""
    rows = []
    for path in sorted((ROOT / "configs/machines").glob("*.yaml")):
        entry = yaml.safe_load(path.read_text(encoding="utf-8"))
        names = ", ".join(code(f"{path.stem}-{variant}") for variant in entry["variants"])
        rows.append([entry["model"], names, entry["source"]])
    return f"{MACHINES}\n{table(['processor', '`--machine`', 'source'], rows)}\n"
