"""Images per CPU-second of one core, from encoded bytes to a batch: cputrain, the installed peers, and the limit.

    python -m benchmarks.input [FOLDER] [--rounds 5]

FOLDER contains JPEGs at any depth, of which 200 are used; without it, photos are generated. Each is decoded as it is,
and as prepared: short side 256, quality 90, 4:2:0. Random crops of a training, 224 x 224, mirrored or not. The limit is
entropy decoding of whole files without output. Peers: the installed ones of benchmarks/input_peers.py.
"""

import argparse
import gc
import json
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from statistics import median

import numpy as np
import torch
from tqdm import tqdm

from benchmarks.input_peers import RANDOM, SIDE, Run, each, installed_peers
from cputrain.affinity.topology.sysfs import this_machine
from cputrain.affinity.views import processor_text
from cputrain.data.formats.open import open_dataset
from cputrain.data.formats.shards import RECORD, Shards
from cputrain.data.formats.source import VERSION
from cputrain.data.loader import IMAGENET_MEAN, IMAGENET_STD, IMAGES_PER_CALL, choose_normalize, decoded_batches
from cputrain.data.order import epoch_order
from cputrain.data.pixels import decode_by_pillow, load_decoder
from cputrain.data.prepare import Options, pack_dataset
from cputrain.studies.bench.figures import seconds_of
from cputrain.studies.bench.limits import (
    COUNT,
    generated_photos,
    images_per_cpu_s,
    last_pixel,
    photos_of,
    prepared,
    without_markers,
)

TIMES = 4
IMAGENET = 1_281_167
CORES = os.sched_getaffinity(0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", nargs="?", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(1)
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    originals = photos_of(options.folder, load_decoder(os.environ)) if options.folder else generated_photos(COUNT)
    # several times each, as some peers take a while to start
    sets = {"original": TIMES * originals, "prepared": TIMES * [prepared(data) for data in originals]}
    contenders = {
        "limit: entropy decoding": entropy_only,
        "ours": ours,
        "ours, Pillow": ours_by_pillow,
        **installed_peers(),
    }
    runs = {(kind, name): contenders[name](files) for kind, files in sets.items() for name in contenders}
    for run in runs.values():
        run()  # compiles and caches once
    gc.freeze()  # as a training does, so that the collector skips the peers' imported modules
    rates: dict[tuple[str, str], list[float]] = {}
    for turn in tqdm([turn for _ in range(options.rounds) for turn in runs], file=sys.stderr):
        rates.setdefault(turn, []).append(images_per_cpu_s(runs[turn], TIMES * len(originals)))
    print(f"{processor_text(this_machine())}\n")
    print(f"| images per CPU-second, {len(originals)} files | original | of ours | prepared | of ours |")
    print("|---|---|---|---|---|")
    for name in contenders:
        cells = [
            f"{median(rates[kind, name]):,.0f} | {median(rates[kind, name]) / median(rates[kind, 'ours']):.2f}"
            for kind in sets
        ]
        print(f"| {name} | {' | '.join(cells)} |")
    print(f"| normalizing a batch of 32 | | | {normalizing(options.rounds):,.0f} | |")
    gain = median(threads_gain(sets["prepared"], options.rounds))
    print(f"\ntwo loader threads against one, shards to batches: {gain:.2f}")
    opened, permuted = start(options.rounds)
    print(f"1,281,167 samples: index opened in {1000 * opened:.1f} ms, an epoch permuted in {1000 * permuted:.1f} ms")


def ours(files: list[bytes]) -> Run:
    """Decode as the loader's threads do."""
    decoder, places = load_decoder(os.environ), np.empty((IMAGES_PER_CALL, SIDE, SIDE, 3), dtype=np.uint8)

    def run() -> None:
        for first in range(0, len(files), IMAGES_PER_CALL):
            some = files[first : first + IMAGES_PER_CALL]
            decoder.decode(some, RANDOM.crops(range(first, first + len(some)), seed=1), places[: len(some)])

    return run


def ours_by_pillow(files: list[bytes]) -> Run:
    place = np.empty((1, SIDE, SIDE, 3), dtype=np.uint8)
    return each(files, lambda data, i: decode_by_pillow([data], RANDOM.crops([i], seed=1), place))


def entropy_only(files: list[bytes]) -> Run:
    """Decode only the last pixel, so that everything before it is read but not transformed."""
    decoder, place = load_decoder(os.environ), np.empty((1, 1, 1, 3), dtype=np.uint8)
    return each([without_markers(data) for data in files], lambda data, _: decoder.decode([data], last_pixel, place))


def threads_gain(files: list[bytes], rounds: int) -> list[float]:
    """Return the wall time of one thread relative to two, in turns, each thread on its own core."""
    pus = tuple(sorted(CORES)[:2])
    if len(pus) < 2:
        return [float("nan")]
    os.sched_setaffinity(0, CORES)
    with tempfile.TemporaryDirectory() as folder:
        for split in ("train", "val"):
            (Path(folder) / f"in/{split}/a").mkdir(parents=True)
            for i, data in enumerate(files):
                (Path(folder) / f"in/{split}/a/{i}.jpg").write_bytes(data)
        out = Path(folder) / "out"
        pack_dataset(open_dataset(str(Path(folder) / "in")), out, Options(kind="imagefolder", source="in"))
        images, decoder = Shards(out, "train"), load_decoder(os.environ)

        def decode(encoded: Sequence[bytes], numbers: Sequence[int], places: np.ndarray) -> list[str | None]:
            assert all(decoder.decode(encoded, RANDOM.crops(numbers, seed=1), places))
            return [None] * len(encoded)

        def seconds(threads: int) -> float:
            shares = [np.arange(len(images))[k : k + 32] for k in range(0, len(images), 32)] * 4
            started = time.perf_counter()
            for _ in decoded_batches(images, shares, decode, side=SIDE, threads=threads, cpus=pus[:threads]):
                pass
            return time.perf_counter() - started

        return [seconds(1) / seconds(2) for _ in range(rounds)]


def start(rounds: int) -> tuple[float, float]:
    """Return the seconds to open ImageNet's index, and to permute an epoch of it."""
    opened, permuted = [], []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        np.save(folder / "train.index.npy", np.zeros(IMAGENET, dtype=RECORD))
        (folder / "train-00000.tar").write_bytes(b"")
        mixing = {"classes_in_32": 1.0, "at_random": 1.0}
        made = {"images": IMAGENET, "shards": 1, "bytes": [0], "mixing": mixing, "unusual": {}, "damaged": []}
        (folder / "manifest.json").write_text(
            json.dumps({"version": VERSION, "classes": ["a"], "options": {}, "splits": {"train": made}}),
            encoding="utf-8",
        )
        for epoch in range(rounds):
            opened.append(seconds_of(lambda: Shards(folder, "train")))
            permuted.append(seconds_of(partial(epoch_order, IMAGENET, 1, epoch)))
    return median(opened), median(permuted)


def normalizing(rounds: int) -> float:
    """Return images/s of one thread from bytes to the network's input."""
    normalize = choose_normalize(IMAGENET_MEAN, IMAGENET_STD, "auto", os.environ)
    images = torch.zeros((32, SIDE, SIDE, 3), dtype=torch.uint8)
    return len(images) / median(seconds_of(lambda: normalize(images)) for _ in range(4 * rounds))


if __name__ == "__main__":
    main()
