"""Submit a batch script to its scheduler."""

import subprocess
from collections.abc import Iterator

from affinity.errors import InputError, RunError

SUBMIT = {"slurm": ("sbatch", "--parsable"), "pbs": ("qsub",)}


def submit(script: str, scheduler: str, chain: int) -> Iterator[str]:
    """Submit the script `chain` times, each job to start after the one before has ended; yields the job IDs.

    Raises InputError where the scheduler's command is missing, RunError where it rejects the job.
    """
    before: str | None = None
    for _ in range(chain):
        argv = [*SUBMIT[scheduler], *(_after(before, scheduler) if before is not None else ())]
        try:
            done = subprocess.run(
                argv, input=script, capture_output=True, encoding="utf-8", errors="surrogateescape", check=False
            )
        except FileNotFoundError:
            raise InputError(f"--submit needs {argv[0]} on PATH: run this on a host of the cluster") from None
        if done.returncode:
            raise RunError(f"{argv[0]} rejected the job: {' '.join(done.stderr.split())}")
        before = done.stdout.strip().partition(";")[0]
        yield before


def _after(job_id: str, scheduler: str) -> tuple[str, str]:
    if scheduler == "slurm":
        return "--dependency", f"afterany:{job_id}"
    return "-W", f"depend=afterany:{job_id}"
