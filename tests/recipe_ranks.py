"""Every shipped recipe for two steps, one after another in the same ranks, small: sizes are reduced, nothing else is.

python -m tests.recipe_ranks IMAGES WEIGHTS OUT PORT..., a port a recipe, as a rank of `cputrain launch`.
"""

import faulthandler
import os
import sys

from cputrain.cli.ranks import bound_here, this_rank
from cputrain.rank_main import train_rank
from cputrain.recipe import load_recipe, recipe_names

CROPS = {"alexnet-bn": 64, "mnist-cnn": 28, "linear": 28}


def main(images: str, weights: str, out: str, ports: list[str]) -> None:
    rank = this_rank()
    assert rank is not None
    for name, port in zip(recipe_names(), ports, strict=True):
        recipe = load_recipe(name)
        crop = CROPS.get(recipe.model.name, 32)
        settings = [
            f"data.path={images}",
            f"data.crop={crop}",
            f"data.resize={crop}",
            "data.images_per_epoch=null",
            "batch.local=4",
            "max_steps=2",
            "evaluate.every_epochs=null",
            f"output={out}/{name}",
            *([f"model.weights={weights}"] if recipe.model.weights else []),
        ]
        recipe = load_recipe(name, settings)
        os.environ["MASTER_PORT"] = port
        worker, observed = bound_here(recipe, rank, check=True)
        train_rank(recipe, rank, worker, observed, resume=False, overwrite=False, prepared=False, check=True)
        faulthandler.cancel_dump_traceback_later()  # a rank ends with its group; this one goes on
        print(f"trained {name}", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:4], sys.argv[4:])
