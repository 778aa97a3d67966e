"""Environment variables: those that decide how torch, OpenMP, MPI and oneCCL behave, without anybody's secrets, and
those by which a rank knows its job and the job's earlier attempts."""

import re
from collections.abc import Mapping

from cputrain.affinity.ranks import rank

PREFIXES = (
    *("OMP_", "KMP_", "GOMP_", "MKL_", "DNNL_", "ONEDNN_", "TORCH", "ATEN_", "MALLOC_", "TCMALLOC_", "GLIBC_TUNABLES"),
    *("UCX_", "PSM2_", "PSM3_", "FI_", "CCL_", "GLOO_", "AFFINITY_", "CPUTRAIN_"),
    *rank.PREFIXES,
)
NAMES = (
    *("LD_PRELOAD", "LD_LIBRARY_PATH", "PYTHONPATH", "VIRTUAL_ENV", "CONDA_PREFIX", "CXX", "TERM", "NO_COLOR"),
    *("MASTER_ADDR", "MASTER_PORT", *rank.ENV.rank_names),
)
SECRET = re.compile(r"TOKEN|SECRET|PASSW|PASSPHRASE|CREDENTIAL|COOKIE|JWT|PRIVATE|AUTH|(^|_)(API)?KEY(S|_|$)")
IN_ADDRESS = re.compile(r"://[^/@\s]+@")  # user:password@
HIDDEN = "(not shown)"


def shown_variables(env: Mapping[str, str]) -> dict[str, str]:
    """The variables that matter, by name; of one whose name tells of a secret only that it is set."""
    found = {name: value for name, value in sorted(env.items()) if name.startswith(PREFIXES) or name in NAMES}
    return {
        name: HIDDEN if SECRET.search(name) else IN_ADDRESS.sub(f"://{HIDDEN}@", value) for name, value in found.items()
    }


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
