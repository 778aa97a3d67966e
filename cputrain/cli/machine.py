"""cputrain machine: save this host's topology."""

import platform
from pathlib import Path

import click

from affinity.filesystem import check_writable
from affinity.topology.save import save_machine
from cputrain.cli.groups import WholeSummaries


@click.group("machine", cls=WholeSummaries)
def command() -> None:
    """Save a host's topology, so that others can plan for it."""


@command.command("save")
@click.argument("file", required=False, type=click.Path(path_type=Path))
def save(file: Path | None) -> None:
    """Write this host's topology into FILE, a new tarball; by default HOSTNAME.tar.xz in this folder.

    It contains the small files of /sys and /proc that cputrain and hwloc read: CPUs, caches, NUMA nodes, the limits of
    this process, the host's name. `cputrain plan --machine FILE` plans for it anywhere.
    """
    file = file or Path(f"{platform.node() or 'host'}.tar.xz")
    check_writable(file.parent, "FILE's folder")
    files = save_machine(Path("/"), file)
    click.echo(f"{file}: {files:,} files; plan with: cputrain plan --machine {file}")
