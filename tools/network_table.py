"""Trace networks and write their layers to configs/networks/: python -m tools.network_table [NAME ...]

The planner and `cputrain simulate` read a network's layers from its file. `--check` compares the files with the
networks and writes nothing.
"""

import argparse
import json
import math
import sys
from collections.abc import Sequence
from typing import Any

from cputrain.models.settings import TIMM, TORCHVISION
from cputrain.models.tracing import SIDE, TracedRow, sums_of, table_of, traced
from cputrain.models.vision import import_torchvision
from cputrain.predict.layers import NETWORKS, LayerSize, layers_at, network_file, read_network
from cputrain.recipe.schema import OWN_NETWORKS

KEPT_TOLERANCE = 0.02  # as the files scale with the image's area


def _facts(layer: TracedRow | LayerSize) -> tuple[object, ...]:
    """Return the properties that a traced layer and a layer from a file share."""
    flop = layer.flop[0] if isinstance(layer, LayerSize) else layer.flop
    return layer.name, layer.kind, tuple(layer.weights), layer.inputs, layer.outputs, flop


def written(table: dict[str, Any]) -> str:
    """Format a network's file as JSON, a line per layer."""
    rows = ",\n".join(f"  {json.dumps(row)}" for row in table["layers"])
    head = "".join(f"{json.dumps(key)}: {json.dumps(value)},\n" for key, value in table.items() if key != "layers")
    return f'{{\n{head}"layers": [\n{rows}\n]\n}}\n'


def differences(name: str, *others: int) -> list[str]:
    """Return how a network's file differs from the network itself, at the file's side and at others."""
    table = read_network(name)
    if table is None:
        return [f"{name} has no file: run `python -m tools.network_table {name}`"]
    found = []
    for side in (table["side"], *others):
        rows, kept = traced(name, side)
        layers = layers_at(table, side)
        kept_by_file = table["activation_bytes"] * (side / table["side"]) ** 2
        compared: list[tuple[object, object]] = [
            (len(rows), len(layers)),
            *zip(map(_facts, rows), map(_facts, layers), strict=False),
        ]
        found += [
            f"{name} at {side}: {traced_one} in the network, {file_one} in the file"
            for traced_one, file_one in compared
            if traced_one != file_one
        ]
        if not math.isclose(kept, kept_by_file, rel_tol=KEPT_TOLERANCE):
            found.append(f"{name} at {side}: saves {kept} bytes per image, {kept_by_file:.0f} in the file")
    sums = sums_of(layers_at(table, table["side"]))
    return found + [
        f"{name}: {key} is {table[key]}, but {sums[key]} over its layers" for key in sums if table[key] != sums[key]
    ]


def all_names() -> list[str]:
    """Return the names of cputrain's networks, of torchvision's that are not among them, and of timm's with a file."""
    models = import_torchvision("models")
    others = [each for each in models.list_models(module=models) if each not in OWN_NETWORKS]
    by_timm = sorted(file.stem for file in (NETWORKS / "timm").glob("*.json"))
    return [*OWN_NETWORKS, *(f"{TORCHVISION}{each}" for each in others), *(f"{TIMM}{each}" for each in by_timm)]


def main(argv: Sequence[str]) -> int:
    """Trace the networks; return 1 if a check finds a difference."""
    parser = argparse.ArgumentParser(prog="python -m tools.network_table", description=__doc__)
    parser.add_argument("names", nargs="*", help="networks as in model.name  [default: all known]")
    parser.add_argument("--side", type=int, help=f"side of the images  [default: the file's, else {SIDE}]")
    parser.add_argument("--check", action="store_true", help="write nothing; exit with status 1 if a file is wrong")
    options = parser.parse_args(argv)
    wrong = []
    for name in options.names or all_names():
        if options.check:
            wrong += differences(name)
            continue
        known = read_network(name)
        table = table_of(name, options.side or (known["side"] if known else SIDE))
        file = network_file(name) if known else NETWORKS / f"{name.replace(':', '/')}.json"
        file.write_text(written(table), encoding="utf-8")
        print(
            f"{name}: {table['parameters']:,} parameters, {table['gflop']} GFLOP, {len(table['layers'])} layers",
            flush=True,
        )
    sys.stderr.writelines(f"{line}\n" for line in wrong)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
