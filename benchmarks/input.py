"""Images per CPU-second of one core, from encoded bytes to a batch: ours, the peers that are installed, and the limit.

    python -m benchmarks.input [FOLDER] [--rounds 5]

FOLDER holds JPEGs at any depth (default: ../shared/data/imagenet-sample). Each is taken as it is, and as prepared:
short side 256, quality 90, 4:2:0. A training's random part, 224 x 224, mirrored or not. The limit: the entropy decoding
of whole files, with nothing kept of it. Peers: torchvision + Pillow, OpenCV and simplejpeg where they are installed;
both of the last scale without antialiasing.
"""

import argparse
import importlib
import io
import json
import os
import random
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import numpy as np
import torch
from PIL import Image
from tqdm import tqdm

from cputrain.data.decode import decode_pillow
from cputrain.data.loader import batches
from cputrain.data.manifest import VERSION
from cputrain.data.order import epoch_order, sample_generator
from cputrain.data.prepare import Options, prepare
from cputrain.data.shards import RECORD, Shards
from cputrain.data.source import open_folder
from cputrain.data.turbo import Decoder, load
from cputrain.data.views import View, training_look
from cputrain.engine import Normalize
from cputrain.models.vision import import_torchvision
from cputrain.recipe import DataSection

FOLDER = Path(__file__).parents[2] / "shared" / "data" / "imagenet-sample"
SIDE, SHORT, QUALITY = 224, 256, 90
IMAGENET = 1_281_167
ALL = os.sched_getaffinity(0)

One = Callable[[bytes, int], object]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", nargs="?", type=Path, default=FOLDER)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(1)
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    originals = jpegs(options.folder)
    sets = {"original": originals, "prepared": [prepared(data) for data in originals]}
    contenders = {
        "limit: entropy decoding": entropy_only(),
        "ours": ours(),
        "ours, Pillow": ours_by_pillow(),
        **peers(),
    }
    rates: dict[tuple[str, str], list[float]] = {}
    turns = [(kind, name) for _ in range(options.rounds) for kind in sets for name in contenders]
    for kind, name in tqdm(turns, file=sys.stderr):
        rates.setdefault((kind, name), []).append(rate(contenders[name], sets[kind]))
    print(f"| images per CPU-second, {len(originals)} files | original | of ours | prepared | of ours |")
    print("|---|---|---|---|---|")
    for name in contenders:
        cells = [
            f"{median(rates[kind, name]):,.0f} | {median(rates[kind, name]) / median(rates[kind, 'ours']):.2f}"
            for kind in sets
        ]
        print(f"| {name} | {' | '.join(cells)} |")
    print(f"| normalising a batch of 32 | | | {normalising(options.rounds):,.0f} | |")
    gain = median(threads_gain(sets["prepared"], options.rounds))
    print(f"\ntwo loader threads against one, shards to batches: {gain:.2f}")
    opened, permuted = start(options.rounds)
    print(f"1,281,167 samples: index opened in {1000 * opened:.1f} ms, an epoch permuted in {1000 * permuted:.1f} ms")


def jpegs(folder: Path) -> list[bytes]:
    """All files that the fast decoder takes as JPEGs."""
    files = [path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()]
    decode, place = load(os.environ), np.empty((8, 8, 3), dtype=np.uint8)
    return [data for data in files if decode.decode(data, lambda w, h: whole(w, h, 8), place)]


def whole(width: int, height: int, side: int) -> View:
    return View(box=(0, 0, width, height), size=(side, side), at=(0, 0), side=side)


def prepared(data: bytes) -> bytes:
    """As `cputrain prepare --short-side 256` writes it."""
    image = Image.open(io.BytesIO(data)).convert("RGB")
    scale = SHORT / min(image.size)
    size = round(image.width * scale), round(image.height * scale)
    out = io.BytesIO()
    image.resize(size, Image.Resampling.BICUBIC).save(out, "JPEG", quality=QUALITY, subsampling="4:2:0")
    return out.getvalue()


def rate(one: One, files: list[bytes]) -> float:
    started = time.process_time()
    for i, data in enumerate(files):
        one(data, i)
    return len(files) / (time.process_time() - started)


def look(i: int) -> Callable[[int, int], View]:
    return training_look(SIDE, lambda: sample_generator(1, 0, i), min_area=0.08, max_aspect=4 / 3, flip=True)


def ours() -> One:
    decoder, place = load(os.environ), np.empty((SIDE, SIDE, 3), dtype=np.uint8)
    return lambda data, i: decoder.decode(data, look(i), place)


def ours_by_pillow() -> One:
    place = np.empty((SIDE, SIDE, 3), dtype=np.uint8)
    return lambda data, i: decode_pillow(data, look(i), place)


def entropy_only() -> One:
    """The last block alone: what lies before it is read, not transformed."""
    decoder: Decoder = load(os.environ)
    place = np.empty((1, 1, 3), dtype=np.uint8)

    def last(width: int, height: int) -> View:
        return View(box=(width - 1, height - 1, 1, 1), size=(1, 1), at=(0, 0), side=1)

    return lambda data, _: decoder.decode(data, last, place)


def peers() -> dict[str, One]:
    """Other ways to the same pixels, each with its own random part."""
    found: dict[str, One] = {}
    v2 = import_torchvision("transforms.v2")
    crop = [
        v2.RandomResizedCrop(SIDE, ratio=(3 / 4, 4 / 3), antialias=True),
        v2.RandomHorizontalFlip(),
        v2.PILToTensor(),
    ]
    as_bytes = v2.Compose(crop)
    as_floats = v2.Compose(
        [*crop, v2.ToDtype(torch.float32, scale=True), v2.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))]
    )
    found["torchvision + Pillow, uint8"] = lambda data, _: as_bytes(Image.open(io.BytesIO(data)).convert("RGB"))
    found["torchvision + Pillow, float"] = lambda data, _: as_floats(Image.open(io.BytesIO(data)).convert("RGB"))
    if cv2 := installed("cv2"):
        cv2.setNumThreads(1)
        read = cv2.IMREAD_COLOR | cv2.IMREAD_IGNORE_ORIENTATION

        def by_opencv(data: bytes, i: int) -> None:
            image = cv2.imdecode(np.frombuffer(data, np.uint8), read)
            cv2_crop(cv2, image, i)

        found["OpenCV, linear"] = by_opencv
    if (cv2 := installed("cv2")) and (simplejpeg := installed("simplejpeg")):

        def by_simplejpeg(data: bytes, i: int) -> None:
            cv2_crop(cv2, simplejpeg.decode_jpeg(data, fastdct=True, fastupsample=True), i)

        found["simplejpeg, fast DCT + OpenCV, linear"] = by_simplejpeg
    return found


def cv2_crop(cv2: object, image: np.ndarray, i: int) -> None:
    left, top, width, height = look(i)(image.shape[1], image.shape[0]).box
    square = cv2.resize(image[top : top + height, left : left + width], (SIDE, SIDE))  # type: ignore[attr-defined]
    if random.random() < 0.5:
        cv2.flip(square, 1)  # type: ignore[attr-defined]


def installed(name: str) -> object:
    try:
        return importlib.import_module(name)
    except ImportError:
        print(f"{name} is not installed: left out", file=sys.stderr)
        return None


def threads_gain(files: list[bytes], rounds: int) -> list[float]:
    """Wall time with one thread over that with two, in turns, each on a core of its own."""
    pus = tuple(sorted(ALL)[:2])
    if len(pus) < 2:
        return [float("nan")]
    os.sched_setaffinity(0, ALL)
    with tempfile.TemporaryDirectory() as folder:
        for split in ("train", "val"):
            (Path(folder) / f"in/{split}/a").mkdir(parents=True)
            for i, data in enumerate(files):
                (Path(folder) / f"in/{split}/a/{i}.jpg").write_bytes(data)
        out = Path(folder) / "out"
        prepare(open_folder(Path(folder) / "in"), out, Options(kind="imagefolder", source="in"))
        images, decoder = Shards(out, "train"), load(os.environ)

        def decode(data: bytes, i: int, place: np.ndarray) -> None:
            decoder.decode(data, look(i), place)

        def seconds(threads: int) -> float:
            shares = [np.arange(len(images))[k : k + 32] for k in range(0, len(images), 32)] * 4
            started = time.perf_counter()
            for _ in batches(images, shares, decode, crop=SIDE, threads=threads, pus=pus[:threads]):
                pass
            return time.perf_counter() - started

        return [seconds(1) / seconds(2) for _ in range(rounds)]


def start(rounds: int) -> tuple[float, float]:
    """Seconds to open ImageNet's index, and to permute an epoch of it."""
    opened, permuted = [], []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        np.save(folder / "train.index.npy", np.zeros(IMAGENET, dtype=RECORD))
        (folder / "train-00000.tar").write_bytes(b"")
        made = {"images": IMAGENET, "shards": 1, "bytes": [0]}
        (folder / "manifest.json").write_text(
            json.dumps({"version": VERSION, "classes": ["a"], "made": {}, "splits": {"train": made}})
        )
        for epoch in range(rounds):
            begun = time.perf_counter()
            Shards(folder, "train")
            opened.append(time.perf_counter() - begun)
            begun = time.perf_counter()
            epoch_order(IMAGENET, 1, epoch)
            permuted.append(time.perf_counter() - begun)
    return median(opened), median(permuted)


def normalising(rounds: int) -> float:
    """Images per second of one thread from bytes to the network's input."""
    normalize, images = Normalize(DataSection()), torch.zeros((32, SIDE, SIDE, 3), dtype=torch.uint8)
    seconds = []
    for _ in range(4 * rounds):
        started = time.perf_counter()
        normalize(images)
        seconds.append(time.perf_counter() - started)
    return len(images) / median(seconds)


if __name__ == "__main__":
    main()
