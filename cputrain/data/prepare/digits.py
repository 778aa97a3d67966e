"""The 1,797 handwritten digits that scikit-learn carries (UCI, 8 x 8 pixels, 16 shades of gray) as an image folder."""

import shutil
from pathlib import Path

import numpy as np
from PIL import Image

from affinity.errors import InputError

VAL_EVERY = 5  # every fifth image of a class is for validation


def write_digits(out: Path) -> None:
    """Write train/DIGIT/*.png and val/DIGIT/*.png, 8-bit gray. Raises InputError when `out` exists."""
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise InputError(
            "the digits come with scikit-learn, which is not installed: pip install 'cputrain[demo]'"
        ) from None
    if out.exists():
        raise InputError(f"{out} already exists: remove it, or name another folder")
    digits = load_digits()
    partial_out = out.with_name(f".{out.name}.partial")
    shutil.rmtree(partial_out, ignore_errors=True)
    seen = [0] * 10
    for i, (pixels, label) in enumerate(zip(digits.images, digits.target, strict=True)):
        split = "val" if seen[label] % VAL_EVERY == VAL_EVERY - 1 else "train"
        seen[label] += 1
        folder = partial_out / split / str(label)
        folder.mkdir(parents=True, exist_ok=True)
        gray = np.round(pixels * (255 / 16)).astype(np.uint8)
        Image.fromarray(gray).save(folder / f"{i:04d}.png")
    partial_out.rename(out)
