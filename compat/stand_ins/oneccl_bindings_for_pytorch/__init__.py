"""Replaces Intel's oneCCL bindings: importing it registers cputrain's backend "ccl" with torch.distributed."""

import os

import cputrain.comm.ccl  # noqa: F401

__version__ = "2.8.0"  # the last release of the original

os.environ.setdefault("CCL_WORKER_COUNT", "1")  # transformers rejects the backend without it
