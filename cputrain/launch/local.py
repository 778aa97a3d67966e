"""Jobs of local processes: each planned worker of this host runs a command."""

import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path

from cputrain.affinity.errors import InputError
from cputrain.affinity.planner.plan import Plan
from cputrain.affinity.start import isolated_command
from cputrain.files import LOGS, PLAN
from cputrain.launch.options import THIS_HOST
from cputrain.mpi.hostfile import HostGroup
from cputrain.mpi.launchers import Job
from cputrain.mpi.supervise.run import run_local
from cputrain.native_build import COMPILING


def local_job(
    plan: Plan, command: tuple[str, ...], folder: Path, *, verify: bool = True, plain_rank: int | None = None
) -> Job:
    """Return the job that runs a command as each planned worker of this host, with the plan and logs in `folder`.

    The output of `plain_rank` is shown without a label.
    """
    return Job(
        groups=(HostGroup(hosts=THIS_HOST, plan=plan),),
        command=command,
        plan_path=folder / PLAN,
        log_dir=folder / LOGS,
        verify=verify,
        plain_rank=plain_rank,
        names_errors=True,
        starting=COMPILING,
    )


def run_in_scratch(plan: Plan, words: tuple[str, ...], env: Mapping[str, str], *, verify: bool) -> int:
    """Run the cputrain command `words` as each planned worker of this host, with the plan and logs in a temporary
    folder; return the exit status. If a rank fails, the folder is kept for its log, and JobFailedError is raised."""
    scratch = Path(tempfile.mkdtemp(prefix=f"cputrain-{words[0]}-"))
    command = (*isolated_command("cputrain"), *words)
    status = run_local(local_job(plan, command, scratch, verify=verify, plain_rank=0), env)
    shutil.rmtree(scratch)
    return status


def check_local_batch(local_batch: int | None) -> None:
    """Raise InputError if --local-batch is given together with a recipe, which sets its own batch."""
    if local_batch is not None:
        raise InputError(f"--local-batch cannot be combined with a recipe: set batch.local={local_batch} instead")
