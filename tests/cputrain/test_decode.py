"""The crops that both decoders make of real and odd files."""

import ctypes.util
import io
import os
import threading
from collections import Counter
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from random import Random

import numpy as np
import PIL
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from cputrain.affinity.errors import InputError, RunError
from cputrain.data import pixels as decoding
from cputrain.data.pixels import (
    Crop,
    Crops,
    Decode,
    Transform,
    center_crop,
    choose_decoder,
    decode_by_pillow,
    random_box,
)
from cputrain.data.prepare import ImageError
from cputrain.models.vision import import_torchvision
from tests.support.images import encoded

DATA = Path(__file__).parents[3] / "shared" / "data"
SAME_ORDER = int(PIL.__version__.split(".")[0]) >= 13  # of scaling down and across, where both are done
FAST, WHICH = choose_decoder("auto", os.environ)
NEEDS_TURBO = pytest.mark.skipif(not WHICH.startswith("libjpeg-turbo"), reason=f"needs libjpeg-turbo 3: {WHICH}")


@pytest.fixture(params=["auto", "pillow"])
def decode(request: pytest.FixtureRequest) -> Decode:
    return choose_decoder(request.param, os.environ)[0]


def cropped(decode: Decode, data: bytes, crop: Crops, side: int) -> np.ndarray:
    out = np.zeros((1, side, side, 3), dtype=np.uint8)
    if problem := decode([data], crop, out)[0]:
        raise ImageError(problem)
    return out[0]


def random_crops(side: int, seed: int, *, min_area: float = 0.08, flip: bool = True) -> Crops:
    transform = Transform(image_size=side, short_side=side, crop="random_resized", min_area=min_area, flip=flip)
    return transform.crops([0], seed)


def noise(height: int, width: int, seed: int = 0) -> np.ndarray:
    """Pixels with large and small features, in color."""
    rng = np.random.default_rng(seed)
    coarse = rng.integers(0, 255, (8, 8, 3), dtype=np.uint8)
    smooth = np.asarray(Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC)).astype(int)
    return np.clip(smooth + rng.integers(-25, 25, (height, width, 3)), 0, 255).astype(np.uint8)


@given(
    size=st.tuples(st.integers(1, 700), st.integers(1, 700)),
    seed=st.integers(0, 1000),
    min_area=st.floats(0.05, 1),
    max_aspect=st.floats(1, 2),
)
def test_random_boxes_lie_inside(size: tuple[int, int], seed: int, min_area: float, max_aspect: float) -> None:
    left, top, width, height = random_box(*size, Random(seed), min_area=min_area, max_aspect=max_aspect)
    assert 0 <= left < left + width <= size[0] and 0 <= top < top + height <= size[1]


@pytest.mark.parametrize("kind", ["png", "jpeg"])
def test_evaluation_is_torchvision_s_resize_and_center_crop(decode: Decode, kind: str) -> None:
    v2 = import_torchvision("transforms.v2")
    for height, width in ((60, 90), (97, 61), (33, 33)):
        data = encoded(noise(height, width), kind)
        theirs = v2.Compose([v2.Resize(32), v2.CenterCrop(28)])(Image.open(io.BytesIO(data)))
        assert np.array_equal(cropped(decode, data, center_crop(32, 28), 28), np.asarray(theirs))


def test_training_parts_are_cut_out_then_scaled(decode: Decode) -> None:
    data = encoded(noise(60, 90))
    crop = Crop(11, 7, 40, 30, 32, 32, 0, 0, 32)
    theirs = Image.open(io.BytesIO(data)).crop((11, 7, 51, 37)).resize((32, 32), Image.Resampling.BILINEAR)
    assert np.array_equal(cropped(decode, data, lambda *_: crop, 32), np.asarray(theirs))


def test_training_parts_are_seeded_and_mirrored(decode: Decode) -> None:
    data = encoded(noise(60, 90), "jpeg")

    def crop(seed: int, flip: bool = True) -> np.ndarray:
        crop = random_crops(32, seed, min_area=0.3, flip=flip)
        return cropped(decode, data, crop, 32)

    assert np.array_equal(crop(1), crop(1)) and not np.array_equal(crop(1), crop(2))
    flipped = [not np.array_equal(crop(seed), crop(seed, flip=False)) for seed in range(40)]
    assert 8 < sum(flipped) < 32
    assert all(np.array_equal(crop(seed)[:, ::-1], crop(seed, flip=False)) for seed, was in enumerate(flipped) if was)


@pytest.mark.parametrize("kind", ["L", "LA", "P", "RGBA", "CMYK", "1"])
def test_every_kind_of_image_becomes_rgb(decode: Decode, kind: str) -> None:
    image = Image.new("RGB", (20, 30), (200, 100, 50)).convert(kind)
    assert cropped(decode, encoded(image, "TIFF" if kind == "CMYK" else "PNG"), center_crop(16, 16), 16).any()


def test_damage_is_an_image_error(decode: Decode) -> None:
    whole = encoded(noise(64, 64), "jpeg")
    for data in (b"", b"<html>404</html>", whole[: len(whole) // 2], whole[:30]):
        for crop in (
            center_crop(32, 32),
            random_crops(32, 0, min_area=0.5),
        ):
            with pytest.raises(ImageError):
                cropped(decode, data, crop, 32)


def test_odd_jpegs_are_taken_or_named_alike_by_both_decoders() -> None:
    taken: Counter[bool] = Counter()
    odd = [path for path in (DATA / "odd-jpegs").glob("*.*") if path.suffix != ".md"]
    for path in [*odd, *(DATA / "imagenet-sample").rglob("*0.JPEG")]:
        outcomes = []
        for decode in (FAST, decode_by_pillow):
            try:
                outcomes.append(cropped(decode, path.read_bytes(), center_crop(64, 64), 64))
            except ImageError:
                outcomes.append(None)
        ours, theirs = outcomes
        assert (ours is None) == (theirs is None), path
        if ours is not None and theirs is not None:
            assert np.abs(ours.astype(int) - theirs).max() <= (0 if SAME_ORDER else 1), path
        taken[ours is not None] += 1
    assert not taken or (taken[True] > 30 and taken[False] >= 4)


@NEEDS_TURBO
@given(
    size=st.tuples(st.integers(8, 400), st.integers(8, 400)),
    side=st.integers(1, 90),
    seed=st.integers(0, 10_000),
    how=st.sampled_from(
        [
            {"quality": 90, "subsampling": "4:2:0"},
            {"quality": 60, "subsampling": "4:2:2", "progressive": True},
            {"quality": 95, "subsampling": "4:4:4", "optimize": True},
            {"quality": 75, "subsampling": "4:2:0", "restart_marker_rows": 1},
            {"quality": 75, "subsampling": "4:4:4", "restart_marker_rows": 3},
            {"quality": 75, "subsampling": "4:2:2", "restart_marker_blocks": 5},
        ]
    ),
    evaluated=st.booleans(),
)
def test_parts_of_a_jpeg_are_pillow_s_bit_for_bit(
    size: tuple[int, int], side: int, seed: int, how: dict[str, object], evaluated: bool
) -> None:
    """Though no more than the part is decoded: rounding and the chroma beside its edges are as in the whole."""
    data = encoded(noise(*size, seed), "jpeg", **how)

    def crop() -> Crops:
        if evaluated:
            return center_crop(side + seed % 9, side)
        return random_crops(side, seed)

    ours, theirs = cropped(FAST, data, crop(), side), cropped(decode_by_pillow, data, crop(), side)
    assert np.abs(ours.astype(int) - theirs).max() <= (0 if SAME_ORDER else 1)


@NEEDS_TURBO
@given(
    where=st.integers(0, 3000),
    value=st.integers(0, 255),
    short=st.integers(0, 3000),
    how=st.sampled_from([{}, {"restart_marker_rows": 1}, {"progressive": True}]),
)
def test_a_jpeg_with_a_changed_byte_is_decoded_or_refused(
    where: int, value: int, short: int, how: dict[str, object]
) -> None:
    """Headers that lie, markers that are missing: never more than an ImageError."""
    data = bytearray(encoded(noise(90, 120), "jpeg", **how))
    data[where % len(data)] = value
    del data[len(data) - short % 7 : len(data) - 2]
    with suppress(ImageError):
        cropped(FAST, bytes(data), random_crops(32, where, min_area=0.1), 32)


@NEEDS_TURBO
def test_rows_above_and_below_a_part_are_not_decoded() -> None:
    """What is damaged there does not matter, where restart markers stand between the rows."""
    whole = encoded(noise(160, 160), "jpeg", restart_marker_rows=1)
    crop = Crop(20, 64, 32, 32, 32, 32, 0, 0, 32)
    rows = whole.split(b"\xff\xd2")  # the third marker
    damaged = rows[0][:-40] + bytes(40) + b"\xff\xd2" + rows[1][:-42] + bytes(40) + b"\xff\xd9"
    assert len(rows) == 2 and len(damaged) == len(whole)
    assert np.array_equal(cropped(FAST, damaged, lambda *_: crop, 32), cropped(FAST, whole, lambda *_: crop, 32))


@pytest.mark.slow
@NEEDS_TURBO
def test_processors_without_avx2_make_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def argv(cxx: str, output: Path) -> tuple[str, ...]:
        return (*decoding.decoder_build_command(cxx, output), "-DCPUTRAIN_PLAIN")

    monkeypatch.setattr(decoding, "EXTENSION", replace(decoding.EXTENSION, argv=argv))
    plain, _ = choose_decoder("turbo", {"CPUTRAIN_CACHE": str(tmp_path), "PATH": os.environ["PATH"]})
    for seed, size in enumerate([(300, 90), (90, 300), (40, 40), (260, 350), (31, 17)]):
        data = encoded(noise(*size, seed), "jpeg")
        for side in (24, 57):
            crop = center_crop(side + 3, side)
            assert np.array_equal(cropped(plain, data, crop, side), cropped(FAST, data, crop, side))


@NEEDS_TURBO
def test_a_damaged_file_does_not_hinder_the_next() -> None:
    """libjpeg-turbo itself goes on to decode whole ones after any kind of damage, at any byte."""
    decoder = decoding.load_decoder(os.environ)
    whole, crops = encoded(noise(90, 120), "jpeg"), center_crop(40, 32)
    out = np.zeros((2, 32, 32, 3), dtype=np.uint8)
    assert decoder.decode([whole, whole], crops, out) == [True, True]
    bad = [path.read_bytes() for path in (DATA / "odd-jpegs").glob("*.*")]
    for at in range(2, len(whole) - 2, 7):
        changed = bytearray(whole)
        changed[at] ^= 0x55
        bad += [bytes(changed), whole[:at] + whole[-2:], whole[:at] + b"junk" + whole[at:]]
    for data in bad:
        assert decoder.decode([data, whole], crops, out)[1]


@NEEDS_TURBO
def test_threads_decode_at_once_each_with_its_own_buffers() -> None:
    files = [encoded(noise(90 + seed, 120, seed), "jpeg") for seed in range(8)]
    expected = [cropped(decode_by_pillow, data, center_crop(40, 32), 32) for data in files]
    wrong: list[int] = []

    def work(first: int) -> None:
        for i in range(first, first + 80):
            found = cropped(FAST, files[i % 8], center_crop(40, 32), 32).astype(int)
            if np.abs(found - expected[i % 8]).max() > (0 if SAME_ORDER else 1):
                wrong.append(i)

    threads = [threading.Thread(target=work, args=(first,)) for first in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_without_the_library_or_a_compiler_pillow_decodes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    here = {"CPUTRAIN_CACHE": str(tmp_path), "PATH": "/none"}
    if WHICH.startswith("libjpeg-turbo"):
        with pytest.raises(InputError, match=r"no C\+\+ compiler on PATH: install g\+\+, or set data.decoder=pillow"):
            choose_decoder("turbo", here)
    monkeypatch.setattr(decoding, "_packaged", list)
    monkeypatch.setattr(ctypes.util, "find_library", lambda _name: None)
    chosen, why = choose_decoder("auto", here)
    assert (
        chosen is decode_by_pillow and "needs libjpeg-turbo 3, but none was found: pip install 'cputrain[turbo]'" in why
    )
    with pytest.raises(InputError, match="none was found"):
        choose_decoder("turbo", here)


@NEEDS_TURBO
def test_a_decoder_that_does_not_compile_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = tmp_path / "broken.cpp"
    broken.write_text("this is no C++")
    monkeypatch.setattr(decoding, "SOURCES", (broken,))
    env = {"CPUTRAIN_CACHE": str(tmp_path), "PATH": os.environ["PATH"]}
    with pytest.raises(RunError, match=r"cannot compile the image decoder .*see its output in"):
        choose_decoder("turbo", env)
    assert choose_decoder("auto", env)[0] is decode_by_pillow
