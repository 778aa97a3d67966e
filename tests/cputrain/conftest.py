"""A folder to train in."""

from pathlib import Path

import pytest

from tests.support.images import write_images


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A folder with images/ of three classes: 27 to train on, 21 for validation."""
    write_images(tmp_path / "images", train=9, val=7)
    return tmp_path
