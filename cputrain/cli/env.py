"""cputrain env: what a bug report needs."""

import os

import click

from cputrain.cli.json_output import format_option, print_json

PATIENCE_S = 2.0  # for imports: the command ends within 3 s


@click.command("env")
@format_option
def command(output_format: str) -> None:
    """Print what a bug report needs: versions, processor, memory, libraries, the variables that matter.

    It works where torch or torchvision cannot be imported, too, and says what to do about that. Variables whose names
    suggest a secret (TOKEN, PASSWORD, KEY and the like) are listed without their values. `cputrain doctor` checks the
    host.
    """
    from cputrain.doctor.facts import facts, facts_text
    from cputrain.doctor.probe import probed, start_probe
    from cputrain.doctor.software import torch_check, torchvision_check

    env = os.environ
    probe = probed(start_probe(env), PATIENCE_S)
    checks = (torch_check(probe["torch"]), torchvision_check(probe["torchvision"], probe["torch"]))
    found = facts(probe, checks, env)
    if output_format == "json":
        print_json(found)
    else:
        click.echo(facts_text(found))
