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
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median

import numpy as np
import torch
from PIL import Image
from tqdm import tqdm

from cputrain.data.decode import decode_pillow
from cputrain.data.inspect import reencode
from cputrain.data.loader import TOGETHER, batches
from cputrain.data.manifest import VERSION
from cputrain.data.order import epoch_order, sample_generator
from cputrain.data.prepare import Options, prepare
from cputrain.data.shards import RECORD, Shards
from cputrain.data.source import open_folder
from cputrain.data.turbo import load
from cputrain.data.views import View, evaluation_look, training_look
from cputrain.engine import Normalize
from cputrain.models.vision import import_torchvision
from cputrain.recipe import DataSection

FOLDER = Path(__file__).parents[2] / "shared" / "data" / "imagenet-sample"
SIDE, SHORT, QUALITY = 224, 256, 90
IMAGENET = 1_281_167
CORES = os.sched_getaffinity(0)

All = Callable[[list[bytes]], object]


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
        "limit: entropy decoding": entropy_only([*sets["original"], *sets["prepared"]]),
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
    done = load(os.environ).decode(
        files, [evaluation_look(8, 8)] * len(files), np.empty((len(files), 8, 8, 3), np.uint8)
    )
    return [data for data, was in zip(files, done, strict=True) if was]


def prepared(data: bytes) -> bytes:
    """As `cputrain prepare --short-side 256` writes it."""
    return reencode(data, short_side=SHORT, quality=QUALITY).data


def rate(contender: All, files: list[bytes]) -> float:
    started = time.process_time()
    contender(files)
    return len(files) / (time.process_time() - started)


def each(one: Callable[[bytes, int], object]) -> All:
    def every(files: list[bytes]) -> None:
        for i, data in enumerate(files):
            one(data, i)

    return every


def look(i: int) -> Callable[[int, int], View]:
    return training_look(SIDE, lambda: sample_generator(1, 0, i), min_area=0.08, max_aspect=4 / 3, flip=True)


def ours() -> All:
    """As the loader's threads do it."""
    decoder, places = load(os.environ), np.empty((TOGETHER, SIDE, SIDE, 3), dtype=np.uint8)

    def every(files: list[bytes]) -> None:
        for first in range(0, len(files), TOGETHER):
            some = files[first : first + TOGETHER]
            decoder.decode(some, [look(first + k) for k in range(len(some))], places[: len(some)])

    return every


def ours_by_pillow() -> All:
    place = np.empty((SIDE, SIDE, 3), dtype=np.uint8)
    return each(lambda data, i: decode_pillow(data, look(i), place))


def entropy_only(files: list[bytes]) -> All:
    """The last pixel alone: what lies before it is read, not transformed. Without the restart markers of prepared
    files, which would spare even that."""
    decoder, place = load(os.environ), np.empty((1, 1, 1, 3), dtype=np.uint8)
    plain = {data: without_markers(data) for data in files}

    def last(width: int, height: int) -> View:
        return View(box=(width - 1, height - 1, 1, 1), size=(1, 1), at=(0, 0), side=1)

    return each(lambda data, _: decoder.decode([plain[data]], [last], place))


def without_markers(data: bytes) -> bytes:
    """The same coefficients."""
    if b"\xff\xdd\0\4" not in data:
        return data
    out = io.BytesIO()
    Image.open(io.BytesIO(data)).save(out, "JPEG", quality="keep", optimize=True)
    return out.getvalue()


def peers() -> dict[str, All]:
    """Other ways to the same pixels, each with its own random part."""
    found: dict[str, All] = {}
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
    found["torchvision + Pillow, uint8"] = each(lambda data, _: as_bytes(Image.open(io.BytesIO(data)).convert("RGB")))
    found["torchvision + Pillow, float"] = each(lambda data, _: as_floats(Image.open(io.BytesIO(data)).convert("RGB")))
    if cv2 := installed("cv2"):
        cv2.setNumThreads(1)
        read = cv2.IMREAD_COLOR | cv2.IMREAD_IGNORE_ORIENTATION

        def by_opencv(data: bytes, i: int) -> None:
            image = cv2.imdecode(np.frombuffer(data, np.uint8), read)
            cv2_crop(cv2, image, i)

        found["OpenCV, linear"] = each(by_opencv)
    if (cv2 := installed("cv2")) and (simplejpeg := installed("simplejpeg")):

        def by_simplejpeg(data: bytes, i: int) -> None:
            cv2_crop(cv2, simplejpeg.decode_jpeg(data, fastdct=True, fastupsample=True), i)

        found["simplejpeg, fast DCT + OpenCV, linear"] = each(by_simplejpeg)
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
        prepare(open_folder(Path(folder) / "in"), out, Options(kind="imagefolder", source="in"))
        images, decoder = Shards(out, "train"), load(os.environ)

        def decode(encoded: Sequence[bytes], numbers: Sequence[int], places: np.ndarray) -> list[str | None]:
            assert all(decoder.decode(encoded, [look(i) for i in numbers], places))
            return [None] * len(encoded)

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
