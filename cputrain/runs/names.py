"""What a run's files and a job's attempts are called; without recipes, so that `cputrain launch` starts in no time."""

from collections.abc import Mapping
from pathlib import Path

from cputrain.affinity.planner.plan import Plan
from cputrain.affinity.planner.plan_file import PLAN_FILE, plan_to_json
from cputrain.files import write_text

RECIPE, PLAN, ENVIRONMENT, CHECKPOINTS, LOGS, REPORT = (
    "recipe.yaml",
    PLAN_FILE,
    "environment.json",
    "checkpoints",
    "logs",
    "report.html",
)


def write_plan(path: Path, plan: Plan) -> None:
    """Write a plan as JSON, for `cputrain.affinity.bind` to read."""
    write_text(path, plan_to_json(plan))


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
