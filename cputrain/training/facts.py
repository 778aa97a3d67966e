"""What has to be the same on all ranks of a training: versions, recipe and images, as texts that can be compared."""

import json

import torch

from cputrain import __version__
from cputrain.data.formats.checksum import split_checksum
from cputrain.data.formats.dataset import Dataset
from cputrain.data.formats.shards import crc32c
from cputrain.recipe.schema import Recipe
from cputrain.runs.resume import flat

PLACES = ("data.path", "data.stage_dir", "output")  # a host may have its own; what is there is compared


def facts_of(recipe: Recipe, dataset: Dataset) -> dict[str, str]:
    """Name -> text of everything that a rank and another one must have in common."""
    settings = flat(recipe.model_dump(mode="json", by_alias=True))
    facts = {"cputrain": __version__, "torch": torch.__version__.partition("+")[0]}
    facts |= {key: json.dumps(value) for key, value in settings.items() if key not in PLACES}
    if recipe.data.generated:  # from the seed, or a user's own
        return facts | {f"{split} {recipe.data.unit}": f"{len(images):,}" for split, images in dataset.splits.items()}
    names = crc32c("\n".join(dataset.classes).encode(errors="surrogateescape"))
    facts["classes"] = f"{len(dataset.classes):,} (checksum {names:08x})"
    for split, images in dataset.splits.items():
        checksum = split_checksum(images, str(recipe.data.path))
        facts[f"{split} images"] = f"{len(images):,} (checksum {checksum:08x})"
    return facts
