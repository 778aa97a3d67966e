"""Photos to decode: those of a folder, or generated ones as large, and as hard to decode, as ImageNet's."""

import io
import os
from pathlib import Path

import numpy as np
from PIL import Image

from affinity.errors import InputError
from cputrain.data.pixels.crops import center_crop
from cputrain.data.pixels.turbo import TurboDecoder

WIDTH, HEIGHT = 500, 408  # together ImageNet's mean number of pixels
# With these a photo has about the bytes of ImageNet's, 110 kB, and 28 kB once prepared.
FALL, QUALITY, CONTRAST = 1.4, 95, 50.0
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
    Image.fromarray(pixels).save(out, "JPEG", quality=QUALITY, subsampling="4:2:0")
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
    return decoder.decode([data], [center_crop(8, 8)], np.empty((1, 8, 8, 3), np.uint8))[0]
