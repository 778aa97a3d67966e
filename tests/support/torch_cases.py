"""One rank of PyTorch's distributed test cases, all in one process group.

    BACKEND=ccl python -m tests.support.torch_cases RESULTS [CASE...]

Appends a JSON line per case to RESULTS: its name, "pass", "skip" or "fail", and its message. TEMP_DIR is a new folder
that all ranks share.
"""

import json
import os
import sys
import time
import traceback
import unittest
from datetime import timedelta
from pathlib import Path

from cputrain.affinity.rank import rank_from_env, rendezvous

rank = rank_from_env(os.environ)
assert rank is not None
os.environ.update(rendezvous(rank, "127.0.0.1", int(os.environ["MASTER_PORT"])))

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
import torch.distributed.nn.functional  # noqa: E402
from torch.testing._internal.common_distributed import TEST_SKIPS, DistTestCases  # noqa: E402

if os.environ["BACKEND"] == "ccl":
    import cputrain.comm.ccl  # noqa: F401

    for feature in ("ddp", "subgroup"):
        DistTestCases.backend_feature[feature].add("ccl")
from torch.testing._internal.distributed import distributed_test  # noqa: E402


class Cases(distributed_test.TestDistBackend, distributed_test.DistributedTest._DistTestBase):
    """PyTorch's cases, called one by one in this process instead of one process per case."""


# Cases that list backends by name; "mpi" is a listed one without special code.
BY_NAME = ("test_accumulate_gradients_no_sync",)


def run(name: str, file_name: str) -> tuple[str, str]:
    """Return the outcome of one case on this rank, and its message."""
    case = Cases(name)
    distributed_test.BACKEND = "mpi" if name.startswith(BY_NAME) else os.environ["BACKEND"]
    case.rank, case.file_name = rank.rank, file_name
    try:
        getattr(Cases, name)(case)
    except unittest.SkipTest as skip:
        return "skip", str(skip)
    except SystemExit as end:
        why = next((skip.message for skip in TEST_SKIPS.values() if skip.exit_code == end.code), None)
        return ("fail", f"exit {end.code}") if why is None else ("skip", why)
    except Exception:  # noqa: BLE001  any exception of a case is its outcome
        return "fail", traceback.format_exc()
    return "pass", ""


def main() -> None:
    """Run all cases, or the named ones."""
    results = Path(sys.argv[1])
    names = sys.argv[2:] or sorted(name for name in dir(Cases) if name.startswith("test_"))
    torch.set_num_threads(1)
    for folder in ("barrier", "test_dir", "init_dir"):
        Path(os.environ["TEMP_DIR"], folder).mkdir(exist_ok=True)
    dist.init_process_group(os.environ["BACKEND"], timeout=timedelta(seconds=60))
    for name in names:
        started = time.monotonic()
        with results.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"rank": rank.rank, "case": name, "outcome": "begun"}) + "\n")
        torch.manual_seed(0)
        outcome, message = run(name, f"{os.environ['TEMP_DIR']}/{name}")
        with results.open("a", encoding="utf-8") as file:
            took = round(time.monotonic() - started, 2)
            result = {"rank": rank.rank, "case": name, "outcome": outcome, "message": message, "seconds": took}
            file.write(json.dumps(result) + "\n")
        if outcome == "fail":
            os._exit(3)  # the other rank may wait for this one forever
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
