"""The environment variables that decide how torch, OpenMP, MPI and oneCCL behave, without anybody's secrets."""

import re
from collections.abc import Mapping

from cputrain.affinity.ranks import launcher_variables

PREFIXES = (
    *("OMP_", "KMP_", "GOMP_", "MKL_", "DNNL_", "ONEDNN_", "TORCH", "ATEN_", "MALLOC_", "TCMALLOC_", "GLIBC_TUNABLES"),
    *("UCX_", "PSM2_", "PSM3_", "FI_", "CCL_", "GLOO_", "AFFINITY_", "CPUTRAIN_"),
    *launcher_variables.PREFIXES,
)
NAMES = (
    *("LD_PRELOAD", "LD_LIBRARY_PATH", "PYTHONPATH", "VIRTUAL_ENV", "CONDA_PREFIX", "CXX", "TERM", "NO_COLOR"),
    *("MASTER_ADDR", "MASTER_PORT", *launcher_variables.ENV.rank_names),
)
COMPLETE = "_CPUTRAIN_COMPLETE"  # set by a shell that completes a command line, to bash_complete and the like
SECRET = re.compile(r"TOKEN|SECRET|PASSW|PASSPHRASE|CREDENTIAL|COOKIE|JWT|PRIVATE|AUTH|(^|_)(API)?KEY(S|_|$)")
IN_ADDRESS = re.compile(r"://[^/@\s]+@")  # user:password@
HIDDEN = "(not shown)"


def shown_variables(env: Mapping[str, str]) -> dict[str, str]:
    """The variables that matter, by name; of one whose name tells of a secret only that it is set."""
    found = {name: value for name, value in sorted(env.items()) if name.startswith(PREFIXES) or name in NAMES}
    return {
        name: HIDDEN if SECRET.search(name) else IN_ADDRESS.sub(f"://{HIDDEN}@", value) for name, value in found.items()
    }
