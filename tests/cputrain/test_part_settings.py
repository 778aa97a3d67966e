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

PARTS = """
import torch
from cputrain.comm.settings import CommSettings
from cputrain.data.from_settings import open_data, training_transform
from cputrain.data.settings import DataSettings
from cputrain.models.networks import build_model
from cputrain.models.settings import ModelSettings
from cputrain.optim import build_optimizer, set_lr_and_decay
from cputrain.optim_settings import OptimSettings

data = DataSettings(path="synthetic", crop=28, train_images=4)
images = open_data(data, classes=2, seed=7).train
assert len(images) == 4 and training_transform(data, 28, data.train_crop).image_size == 28
network = build_model(ModelSettings(name="lenet"), 2, 28)
optimizer = build_optimizer(network, OptimSettings(name="lars", momentum=0.5))
set_lr_and_decay(optimizer, 0.1, 5e-5)
before = network.fc.weight.clone()
network(torch.rand(4, 3, 28, 28)).square().sum().backward()
optimizer.step()
assert not torch.equal(before, network.fc.weight)
import sys
print([name for name in sys.modules if name.startswith("cputrain.recipe")])
"""


@pytest.mark.slow
def test_data_network_and_optimizer_are_made_from_settings_without_a_recipe() -> None:
    assert subprocess.run([sys.executable, "-c", PARTS], capture_output=True, text=True, check=True).stdout == "[]\n"


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
