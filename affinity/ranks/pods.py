"""Which of a job's pods a process is in: an Indexed Job of Kubernetes numbers its pods, and `cputrain job kubernetes`
names their number."""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from affinity.errors import InputError

INDEX, COUNT = "JOB_COMPLETION_INDEX", "CPUTRAIN_PODS"  # the first is Kubernetes' own
NUMBER = re.compile("[0-9]{1,6}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Pods:
    """A pod's `index` among the `count` pods of its job."""

    index: int = 0
    count: int = 1


def pods_of(env: Mapping[str, str]) -> Pods:
    """The pods of this process's job; one, where there is no such job. Raises InputError for variables that are wrong.

    The index alone says nothing: the pods of most Indexed Jobs have nothing to do with each other.
    """
    if COUNT not in env:
        return Pods()
    index, count = env.get(INDEX, ""), env[COUNT]
    if not (NUMBER.fullmatch(index) and NUMBER.fullmatch(count) and int(index) < int(count)):
        raise InputError(
            f"{COUNT}={count[:30]} and {INDEX}={index[:30] or 'unset'}: the index must be a number below the count: "
            f"start with the manifest of cputrain job kubernetes, or unset {COUNT}"
        )
    return Pods(index=int(index), count=int(count))
