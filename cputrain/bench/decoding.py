"""Images per second and core: decoding, cropping, normalizing."""

import io
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from cputrain.affinity.errors import InputError, RunError
from cputrain.affinity.planner.records import Record
from cputrain.affinity.planner.request import DECODING
from cputrain.affinity.topology.machine import Machine
from cputrain.bench.figures import Figure, Report, figure_of, interleaved
from cputrain.data.loader import IMAGENET_MEAN, IMAGENET_STD, IMAGES_PER_CALL, choose_normalize
from cputrain.data.pixels import (
    Crop,
    Decode,
    Transform,
    TurboDecoder,
    center_crop,
    choose_decoder,
    decode_by_pillow,
    load,
)
from cputrain.data.prepare import reencode
from cputrain.measurements import rate_record

WIDTH, HEIGHT = 500, 408  # together ImageNet's mean number of pixels
# With these a photo has about the bytes of ImageNet's, 110 kB, and 28 kB once prepared.
FALL, PHOTO_QUALITY, CONTRAST = 1.4, 95, 50.0
COUNT, TEST_COUNT, MOST = 48, 4, 200


def generated_photos(count: int) -> list[bytes]:
    """JPEGs with the spectrum of photos, amplitudes falling with a power of the frequency (Field 1987), in colors that
    differ little."""
    rng = np.random.Generator(np.random.Philox(key=count))
    frequency = np.hypot(np.fft.fftfreq(HEIGHT)[:, None], np.fft.rfftfreq(WIDTH)[None, :])
    frequency[0, 0] = np.inf
    return [_photo(rng, frequency**-FALL) for _ in range(count)]


def _photo(rng: np.random.Generator, amplitude: np.ndarray) -> bytes:
    def layer() -> np.ndarray:
        phases = rng.uniform(0, 2 * np.pi, amplitude.shape)
        values: np.ndarray = np.fft.irfft2(amplitude * np.exp(1j * phases), (HEIGHT, WIDTH))
        return np.asarray(values / values.std())

    light = layer()
    colors = [CONTRAST * (0.95 * light + 0.3 * layer()) + 128 for _ in range(3)]
    pixels = np.clip(np.stack(colors, axis=-1), 0, 255).astype(np.uint8)
    out = io.BytesIO()
    Image.fromarray(pixels).save(out, "JPEG", quality=PHOTO_QUALITY, subsampling="4:2:0")
    return out.getvalue()


def photos_of(folder: Path, decoder: TurboDecoder | None) -> list[bytes]:
    """The first JPEGs in a folder, at any depth. Raises InputError where there are none."""
    if not folder.is_dir():
        raise InputError(f"{folder} is not a folder: name one with JPEGs")
    paths = (Path(place) / name for place, _, names in sorted(os.walk(folder)) for name in sorted(names))
    found: list[bytes] = []
    for path in paths:
        if len(found) == MOST:
            break
        data = path.read_bytes()
        if data.startswith(b"\xff\xd8") and (decoder is None or _decodes(decoder, data)):
            found.append(data)
    if not found:
        raise InputError(f"{folder} contains no JPEG: name a folder with JPEGs, at any depth")
    return found


def _decodes(decoder: TurboDecoder, data: bytes) -> bool:
    return decoder.decode([data], center_crop(8, 8), np.empty((1, 8, 8, 3), np.uint8))[0]


SIDE = 224
RANDOM = Transform(image_size=SIDE, short_side=SIDE, crop="random_resized")
SHORT_SIDE, QUALITY = 256, 90  # of prepared images
TURBO, PILLOW, LIMIT = "libjpeg-turbo", "Pillow", "entropy decoding alone"
UNIT = "images per CPU-second"
BATCHES = 8  # of one measurement of normalizing


def bench_decoding(
    machine: Machine, folder: Path | None, env: Mapping[str, str], *, repeats: int, quick: bool
) -> tuple[Report, tuple[Record, ...]]:
    """Decode random crops of 224 x 224 on one core. Raises InputError for a folder without JPEGs."""
    decoder, missing = _turbo(env)
    photos = photos_of(folder, decoder) if folder else generated_photos(TEST_COUNT if quick else COUNT)
    sets = {"original": photos, "prepared": [prepared(photo) for photo in photos]}
    runs = {
        (kind, name): _run(decode, files)
        for kind, files in sets.items()
        for name, decode in _decoders(decoder, env).items()
    }
    entropy = {kind: _entropy_run(decoder, files) for kind, files in sets.items()} if decoder else {}
    runs |= {(kind, LIMIT): run for kind, run in entropy.items()}
    named = {f"{kind}, {name}": run for (kind, name), run in runs.items()}
    with_one_core = _on_one_core(machine, lambda: interleaved(named, repeats))
    figures = [_figure(key, with_one_core, decoded=bool(entropy)) for key in named if LIMIT not in key]
    figures.append(figure_of("normalizing a batch of 32", _normalizing(env, repeats), UNIT))
    pixels = _mean_pixels(photos)
    source = f"{len(photos)} JPEGs of {folder}" if folder else f"{len(photos)} generated JPEGs"
    sizes = sum(map(len, photos)) / len(photos) / 1000
    title = f"decoding on one core of {machine.name}: {source}, {pixels:,.0f} pixels and {sizes:.0f} kB each"
    command = f"cputrain bench data {folder}" if folder else "cputrain bench data"
    records = [
        _record(machine, name, with_one_core[f"original, {name}"], pixels, command) for name in _decoders(decoder, env)
    ]
    notes = ("prepared: short side 256, quality 90, as `cputrain prepare --short-side 256` writes them", *missing)
    return Report(title=title, figures=tuple(figures), notes=notes), tuple(records)


def _turbo(env: Mapping[str, str]) -> tuple[TurboDecoder | None, tuple[str, ...]]:
    """The fast decoder, or why there is none."""
    try:
        return load(env), ()
    except (InputError, RunError) as error:
        return None, (f"{TURBO} is not measured: {error}",)


def _decoders(decoder: TurboDecoder | None, env: Mapping[str, str]) -> dict[str, Decode]:
    return {**({TURBO: choose_decoder("turbo", env)[0]} if decoder else {}), PILLOW: decode_by_pillow}


def _figure(name: str, measured: Mapping[str, Sequence[float]], *, decoded: bool) -> Figure:
    kind = name.partition(",")[0]
    limit = figure_of("", measured[f"{kind}, {LIMIT}"], "").value if decoded else None
    return figure_of(name, measured[name], UNIT, limit=limit, limited_by=LIMIT if decoded else "")


def _record(machine: Machine, name: str, rates: Sequence[float], pixels: float, command: str) -> Record:
    """Nanoseconds of a core for each pixel of an original image."""
    spread = figure_of("", [1e9 / rate / pixels for rate in rates], "").spread
    return rate_record(machine, f"{DECODING} {name}", spread, command=command)


def _on_one_core(machine: Machine, work: Callable[[], dict[str, list[float]]]) -> dict[str, list[float]]:
    """Work with one thread on the last core: the first ones take the host's interrupts."""
    before, threads = os.sched_getaffinity(0), torch.get_num_threads()
    os.sched_setaffinity(0, {machine.allowed_cores[-1].pus[0]})
    torch.set_num_threads(1)
    try:
        return work()
    finally:
        os.sched_setaffinity(0, before)
        torch.set_num_threads(threads)


def images_per_cpu_s(work: Callable[[], object], images: int) -> float:
    """Images per CPU-second of this process."""
    started = time.process_time()
    work()
    return images / (time.process_time() - started)


def _run(decode: Decode, files: list[bytes]) -> Callable[[], float]:
    """Decodes all files as the loader's threads do."""
    places = np.empty((IMAGES_PER_CALL, SIDE, SIDE, 3), dtype=np.uint8)

    def once() -> None:
        for first in range(0, len(files), IMAGES_PER_CALL):
            some = files[first : first + IMAGES_PER_CALL]
            problems = decode(some, RANDOM.crops(range(first, first + len(some)), seed=1), places[: len(some)])
            if any(problems):
                raise InputError(f"a JPEG cannot be decoded: {next(filter(None, problems))}")

    return lambda: images_per_cpu_s(once, len(files))


def _entropy_run(decoder: TurboDecoder, files: list[bytes]) -> Callable[[], float]:
    """Decodes the last pixel alone: all that lies before it is read, and not transformed."""
    place = np.empty((1, 1, 1, 3), dtype=np.uint8)
    plain = [without_markers(data) for data in files]

    def once() -> None:
        for data in plain:
            decoder.decode([data], last_pixel, place)

    return lambda: images_per_cpu_s(once, len(files))


def last_pixel(_place: int, width: int, height: int) -> Crop:
    """The crop of the last pixel alone."""
    return Crop(width - 1, height - 1, 1, 1, 1, 1, 0, 0, 1)


def without_markers(data: bytes) -> bytes:
    """The same coefficients without restart markers, which would spare the reading too."""
    if b"\xff\xdd\0\4" not in data:
        return data
    out = io.BytesIO()
    Image.open(io.BytesIO(data)).save(out, "JPEG", quality="keep", optimize=True)
    return out.getvalue()


def prepared(data: bytes) -> bytes:
    """A JPEG as `cputrain prepare --short-side 256` writes it."""
    return reencode(data, short_side=SHORT_SIDE, quality=QUALITY).data


def _mean_pixels(files: list[bytes]) -> float:
    sizes = [Image.open(io.BytesIO(data)).size for data in files]
    return sum(width * height for width, height in sizes) / len(sizes)


def _normalizing(env: Mapping[str, str], repeats: int) -> list[float]:
    """Images per CPU-second from bytes to the network's input."""
    normalize = choose_normalize(IMAGENET_MEAN, IMAGENET_STD, "auto", env)
    images = torch.zeros((32, SIDE, SIDE, 3), dtype=torch.uint8)

    def once() -> None:
        for _ in range(BATCHES):
            normalize(images)

    return interleaved({"": lambda: images_per_cpu_s(once, BATCHES * len(images))}, repeats)[""]
