"""`runtime` and `launch` of IPEX for CPUs."""

from . import runtime as runtime
