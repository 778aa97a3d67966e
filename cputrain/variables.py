"""Environment variables: those that affect torch, OpenMP, MPI and oneCCL, shown without secrets, and those that tell a
rank its job and whether the job was restarted."""

import re
from collections.abc import Mapping

from cputrain.affinity import rank

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

# torchrun's names, as scripts know them.
ATTEMPT, MAX_ATTEMPTS, JOB = "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS", "TORCHELASTIC_RUN_ID"
SLURM_JOB, SLURM_RESTARTS = "SLURM_JOB_ID", "SLURM_RESTART_COUNT"  # a requeued job keeps its ID
UNNAMED = "none"  # torchrun's name for jobs without --rdzv-id

KERNELS_VARIABLE = "CPUTRAIN_KERNELS"  # auto or off; `import torch` reads it
RECORDING_VARIABLE = "CPUTRAIN_RECORDING"  # where and how long `import torch` records operators, for `bench operators`


def shown_variables(env: Mapping[str, str]) -> dict[str, str]:
    """Return the relevant variables by name; the value is hidden if the name suggests a secret."""
    found = {name: value for name, value in sorted(env.items()) if name.startswith(PREFIXES) or name in NAMES}
    return {
        name: HIDDEN if SECRET.search(name) else IN_ADDRESS.sub(f"://{HIDDEN}@", value) for name, value in found.items()
    }


def restart_variables(attempt: int, restarts: int, job: str) -> tuple[tuple[str, str], ...]:
    """Return the variables that tell ranks of a restartable job its attempt; `job` is unique and the same for all
    attempts."""
    return ((ATTEMPT, str(attempt)), (MAX_ATTEMPTS, str(restarts)), (JOB, job)) if restarts else ()


def job_in(env: Mapping[str, str]) -> str:
    """Return the name of this rank's job, the same for all its attempts; "" if it has none."""
    name = env.get(JOB, "")
    return env.get(SLURM_JOB, "") if name in ("", UNNAMED) else name


def lock_name_in(env: Mapping[str, str]) -> str:
    """Return the name of this job for the run's lock: the scheduler's ID if there is one, as each start of a requeued
    job generates a new name."""
    return env.get(SLURM_JOB) or env.get(JOB, "")


def is_restarted(env: Mapping[str, str]) -> bool:
    """Whether this rank's job has failed before and was restarted, by cputrain, torchrun, Slurm or Kubernetes."""
    return any(env.get(name, "0") not in ("", "0") for name in (ATTEMPT, SLURM_RESTARTS))
