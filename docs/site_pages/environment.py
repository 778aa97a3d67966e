"""Page of the environment variables that cputrain reads and sets, and of each fabric's variables (mpi/fabric.py)."""

import ast
import re
from collections.abc import Iterator

from cputrain.mpi.fabric import FABRICS, Fabric
from site_pages.imports import ROOT, TOP
from site_pages.text import code, plain, table

OURS = re.compile(r"(CPUTRAIN|AFFINITY)_[A-Z_]+")
INTRODUCTION = """# Environment variables

## Variables of cputrain

"""
MEANINGS = {
    "AFFINITY_ALLOW_OTHER_LAYOUT": "read: `1` allows a plan that was made for a machine with another layout",
    "AFFINITY_PLAN": "set for every rank: the plan that it is bound by",
    "AFFINITY_WORKER": "set for every rank: its worker in that plan",
    "CPUTRAIN_CACHE": "read: folder for compiled code and measurements, on a file system without noexec; default: "
    "`$XDG_CACHE_HOME/cputrain`, or `~/.cache/cputrain`",
    "CPUTRAIN_KERNELS": "read at `import torch`: `auto` registers kernels below torch's operators, as "
    "`cputrain.kernels.enable()`; otherwise nothing of cputrain is imported; set by `cputrain launch --kernels`. "
    "Trainings of cputrain with engine=native have these kernels unless it is `off`",
    "CPUTRAIN_PODS": "read by `cputrain launch`: the job's number of pods; `JOB_COMPLETION_INDEX` is this pod's index",
}
# Internal to a job: the secret of its agents, the mark of its processes, the files for a rank's stack and heartbeats.
INTERNAL = {
    *("CPUTRAIN_JOB_TOKEN", "CPUTRAIN_RANKS", "CPUTRAIN_RECORDING", "CPUTRAIN_STACK_FILE", "CPUTRAIN_STATE_FILE"),
}
OTHERS = [
    (
        "MASTER_ADDR, MASTER_PORT",
        "read and set: where the ranks meet ([launching](../guides/launching.md#where-the-ranks-meet))",
    ),
    (
        "RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE",
        "set for every rank, as torch.distributed's `env://` reads them",
    ),
    ("GLOO_SOCKET_IFNAME", "set for every rank unless it is set: the interface of the route to rank 0"),
    (
        "CCL_WORKER_COUNT",
        "set for every rank unless it is set: 1 (oneCCL's default) or the number of threads on the plan's comm cores",
    ),
    ("LD_PRELOAD", "read to find the OpenMP runtime and the allocator; set if the plan preloads one"),
    ("NO_COLOR", "read: if it is not empty, the terminal gets no color"),
    ("TERM", "read: `dumb` disables color and redrawn progress lines"),
    (
        "TORCHELASTIC_RESTART_COUNT, TORCHELASTIC_MAX_RESTARTS",
        "set for every rank by `--restarts N`: the attempt, from 0, and N; `cputrain train` reads the first, "
        "and continues from its last checkpoint if it is above 0",
    ),
    (
        "SLURM_JOB_ID, SLURM_RESTART_COUNT",
        "read: the number of a requeued job and how often it was requeued; `cputrain train` continues from its last "
        "checkpoint, and ignores a lock that the same job has left on a file server",
    ),
    ("TQDM_MININTERVAL", "read: seconds between updates of the progress bar"),
    ("TORCH_DISTRIBUTED_DEBUG", "read by PyTorch: `DETAIL` names ranks whose collectives differ"),
]
PLANNED = """## Variables of a plan

`cputrain plan` prints the variables of OpenMP, the allocator and oneCCL that every worker gets, with their reasons. An
inherited variable that contradicts them is reported and replaced; `--keep-env` keeps it.

## Variables of each network

`--fabric NAME` sets these for every rank. A variable that is already set keeps its value.
"""


def environment() -> str:
    """Return tables of the project's, the ranks' and each fabric's variables. Raises KeyError if one has no meaning."""
    own = [[code(name), MEANINGS[name]] for name in sorted(own_variables() - INTERNAL)]
    others = [[", ".join(map(code, names.split(", "))), text] for names, text in OTHERS]
    networks = [_network(fabric) for fabric in FABRICS.values()]
    return "\n".join([INTRODUCTION + table(["variable", "meaning"], own + others) + "\n", PLANNED, *networks])


def _network(fabric: Fabric) -> str:
    rows = [[code(name), code(value), plain(reason)] for name, value, reason in fabric.settings]
    return f"### {fabric.name}\n\n{table(['variable', 'value', 'reason'], rows)}\n"


def own_variables() -> set[str]:
    """Return the names CPUTRAIN_* and AFFINITY_* in the code."""
    return {text for text in _texts() if OURS.fullmatch(text)}


def _texts() -> Iterator[str]:
    for top in TOP:
        for path in (ROOT / top).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Constant) and isinstance(node.value, str):
                    yield node.value
