"""Settings of the parts: usable without a recipe, and inherited by the recipe's sections."""

import subprocess
import sys
from dataclasses import FrozenInstanceError, fields

import pytest

from cputrain.comm.settings import CommSettings
from cputrain.data.settings import Augmentation, DataSettings
from cputrain.models.settings import ModelSettings
from cputrain.optim_settings import OptimSettings
from cputrain.recipe.schema import Recipe


def test_settings_import_neither_torch_nor_pydantic() -> None:
    modules = "comm.settings, cputrain.data.settings, cputrain.models.settings, cputrain.optim_settings"
    code = (
        f"import sys, cputrain.{modules}; print({{'torch', 'numpy', 'pydantic', 'cputrain.recipe'}} & set(sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "set()\n"


@pytest.mark.parametrize(
    ("section", "settings"),
    [
        (Recipe().data, DataSettings()),
        (Recipe().data.augment, Augmentation()),
        (Recipe().model, ModelSettings()),
        (Recipe().optim, OptimSettings()),
        (Recipe().comm, CommSettings()),
    ],
)
def test_a_section_is_its_part_s_settings_with_the_same_defaults(section: object, settings: object) -> None:
    assert isinstance(section, type(settings))
    for field in fields(settings):  # type: ignore[arg-type]
        if field.name != "augment":
            assert getattr(section, field.name) == getattr(settings, field.name)
    with pytest.raises(FrozenInstanceError):
        settings.path = "x"  # type: ignore[attr-defined]
