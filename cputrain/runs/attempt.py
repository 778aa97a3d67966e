"""What a rank knows of its job's attempts: whether the job has failed before, and which one it is."""

from collections.abc import Mapping
from pathlib import Path

from cputrain.runs.folder import has_run, job_of

# The names of torchrun, which scripts know.
ATTEMPT, MOST_ATTEMPTS, JOB = "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS", "TORCHELASTIC_RUN_ID"
SLURM_JOB, SLURM_RESTARTS = "SLURM_JOB_ID", "SLURM_RESTART_COUNT"  # a requeued job keeps its number
UNNAMED = "none"  # torchrun's name of every job without --rdzv-id


def restart_variables(attempt: int, restarts: int, job: str) -> tuple[tuple[str, str], ...]:
    """What ranks find in their environment where the job may be restarted; `job` is the same for all attempts of a job,
    and no other's."""
    return ((ATTEMPT, str(attempt)), (MOST_ATTEMPTS, str(restarts)), (JOB, job)) if restarts else ()


def job_in(env: Mapping[str, str]) -> str:
    """The name of the job that this rank belongs to, for all its attempts; "" where it has none of its own."""
    name = env.get(JOB, "")
    return env.get(SLURM_JOB, "") if name in ("", UNNAMED) else name


def lock_name_in(env: Mapping[str, str]) -> str:
    """The name of this job in its lock: that of the scheduler, as each start of a requeued job makes a new one of its
    own."""
    return env.get(SLURM_JOB) or env.get(JOB, "")


def is_restarted(env: Mapping[str, str]) -> bool:
    """Whether this rank belongs to a job that has failed before and was started again, by us, torchrun, Slurm or
    Kubernetes."""
    return any(env.get(name, "0") not in ("", "0") for name in (ATTEMPT, SLURM_RESTARTS))


def continues_run(folder: Path, env: Mapping[str, str], *, overwrite: bool) -> bool:
    """Whether this rank's job has failed before and continues the run in a folder. With `overwrite` one of its own: an
    older one is still there where the attempts before have ended early."""
    return is_restarted(env) and has_run(folder) and (not overwrite or job_of(folder) == job_in(env))
