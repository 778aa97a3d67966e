"""What is done to training images: each thing alone, against the plainest way to it; the same for the same seed."""

from dataclasses import fields
from random import Random

import numpy as np
import pytest
import torch
from PIL import Image, ImageDraw

from cputrain.data.order import image_rng
from cputrain.data.pixels import Transform, augment
from cputrain.data.settings import Augmentation

SIDE = 64
CHANGES = [field.name for field in fields(Augmentation)]


def picture() -> np.ndarray:
    image = Image.new("RGB", (SIDE, SIDE), (90, 120, 60))
    draw = ImageDraw.Draw(image)
    draw.rectangle((30, 8, 34, 30), fill=(250, 10, 20))
    draw.ellipse((8, 34, 24, 50), fill=(10, 40, 230))
    return np.asarray(image).copy()


def done(seed: int = 1, **options: float) -> np.ndarray:
    pixels = picture()
    augment(pixels, Augmentation(**options), Random(seed))
    return pixels


def red_center(pixels: np.ndarray) -> tuple[float, float]:
    """Where the red bar is, from the picture's center, in pixels."""
    ys, xs = np.nonzero((pixels[..., 0] > 180) & (pixels[..., 1] < 60))
    return xs.mean() - (SIDE - 1) / 2, ys.mean() - (SIDE - 1) / 2


def test_nothing_is_changed_by_default() -> None:
    assert not Augmentation()
    assert Augmentation(lighting=0.1)
    assert np.array_equal(done(), picture())


@pytest.mark.parametrize("what", [name for name in CHANGES if not name.startswith("randaugment")])
def test_each_is_drawn_by_the_seed(what: str) -> None:
    assert np.array_equal(done(1, **{what: 0.2}), done(1, **{what: 0.2}))
    assert not np.array_equal(done(1, **{what: 0.2}), done(2, **{what: 0.2}))
    assert not np.array_equal(done(1, **{what: 0.2}), picture())


@pytest.mark.slow
def test_randaugment_is_drawn_by_the_image_s_seed_and_leaves_torch_s_generator_alone() -> None:
    before = torch.get_rng_state()
    made = [done(seed, randaugment=2) for seed in range(60)]
    assert torch.equal(torch.get_rng_state(), before)
    assert all(np.array_equal(done(seed, randaugment=2), made[seed]) for seed in (0, 7, 59))
    changed = [not np.array_equal(each, picture()) for each in made]
    assert len({each.tobytes() for each in made}) > 30 and 40 < sum(changed) < 60, "some operations change nothing"

    def distance(magnitude: int) -> float:
        made = (done(seed, randaugment=1, randaugment_magnitude=magnitude) for seed in range(60))
        return float(np.mean([np.abs(each.astype(int) - picture()).mean() for each in made]))

    assert distance(3) < distance(15) < distance(30)
    assert not Augmentation(randaugment_magnitude=20)


def test_a_picture_is_turned_about_its_center() -> None:
    x, y = red_center(picture())
    angles = []
    for seed in range(60):
        u, v = red_center(done(seed, rotate=0.1))
        assert abs(np.hypot(u, v) - np.hypot(x, y)) < 1
        angles.append((np.arctan2(v, u) - np.arctan2(y, x)) / (2 * np.pi))
    assert -0.11 < min(angles) < -0.06 and 0.06 < max(angles) < 0.11


def test_a_picture_is_scaled_about_its_center_and_moved() -> None:
    x, y = red_center(picture())
    factors = [red_center(done(seed, zoom=0.3))[1] / y for seed in range(60)]
    assert 0.65 < min(factors) < 0.8 and 1.2 < max(factors) < 1.35
    moves = [np.subtract(red_center(done(seed, shift=0.2)), (x, y)) / SIDE for seed in range(60)]
    assert np.abs(moves).max() < 0.21
    assert np.min(moves) < -0.15 and np.max(moves) > 0.15


def test_colors_change_by_no_more_than_requested() -> None:
    before = picture().astype(float)
    for seed in range(20):
        ratio = done(seed, brightness=0.3).astype(float)[60, 60] / before[60, 60]
        assert (ratio > 0.68).all() and (ratio < 1.32).all() and np.ptp(ratio) < 0.03
        gray = done(seed, saturation=1.0).astype(float)
        luma = before @ [0.299, 0.587, 0.114]
        assert np.abs(gray @ [0.299, 0.587, 0.114] - luma)[60, 60] < 2
        light = done(seed, lighting=0.1).astype(float) - before
        assert np.abs(light[60, 60] - light[5, 5]).max() < 1 and np.abs(light[60, 60]).max() < 40


def test_plain_parts_lie_anywhere_in_the_scaled_image() -> None:
    crop_of = Transform(image_size=56, short_side=64, crop="random").crops(range(300), seed=1)
    crops = [crop_of(i, 300, 200) for i in range(300)]
    assert {(crop.scaled_width, crop.scaled_height) for crop in crops} == {(96, 64)}
    assert {crop.x for crop in crops} == set(range(41)) and {crop.y for crop in crops} == set(range(9))
    assert 100 < sum(crop.flip for crop in crops) < 200


def test_streams_of_a_sample_are_independent() -> None:
    first, second = (image_rng(1, 2, 3, stream).random() for stream in (0, 1))
    assert first != second and first == image_rng(1, 2, 3).random()
