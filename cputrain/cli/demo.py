"""cputrain demo: the whole way on real images, in this folder."""

import os
import shlex
import sys

import click

from cputrain.affinity.start import own_program
from cputrain.cli.options import settings_argument
from cputrain.cli.plan import plan_command as plan_command
from cputrain.cli.prepare import prepare_command as prepare_command
from cputrain.recipe.loading import load_recipe

RECIPE = "demo-digits"
IMAGES = "data/digits-folder"  # data.path gets the shards


@click.command("demo")
@settings_argument
def demo_command(settings: tuple[str, ...]) -> None:
    """Plan this machine, pack scikit-learn's handwritten digits, train ResNet-50 on them, evaluate, write the report.

    Everything is written below this folder: data/ and runs/demo, where the run of an earlier demo is replaced. It takes
    minutes on two cores; KEY=VALUE sets a key of the recipe, as in max_steps=10 for a trial of some seconds. The digits
    come with scikit-learn: pip install "cputrain[demo]".
    """
    shards = str(load_recipe(RECIPE, settings).data.path)
    for each, words in ((plan_command, ("plan",)), (prepare_command, ("prepare", "digits", IMAGES, shards))):
        click.echo(f"cputrain {shlex.join(words)}")
        each.main(args=list(words[1:]), prog_name="cputrain", standalone_mode=False)
    training = ("train", RECIPE, *settings, "--overwrite")
    click.echo(f"cputrain {shlex.join(training)}")
    sys.stdout.flush()
    os.execv(sys.executable, (*own_program("cputrain"), *training))
