"""A launch in each pod of a job: the workers of all pods are the ranks of one job."""

import logging
import socket
import time
from collections.abc import Mapping
from dataclasses import replace

from affinity.errors import InputError, RunError
from affinity.ranks.pods import COUNT, Pods, pods_of
from affinity.ranks.rank import MASTER_PORT
from affinity.ranks.rendezvous import port_of
from cputrain.launch.options import PlanningOptions
from mpi.launchers.job import Job
from mpi.supervise.connection import TOKEN_VARIABLE

NAME_S = 300.0  # for the first pod to be scheduled and named, when its image is pulled
logger = logging.getLogger(__name__)


def with_pods(options: PlanningOptions, env: Mapping[str, str]) -> PlanningOptions:
    """The options for one of several pods, which are the job's hosts. Raises InputError where they contradict that."""
    pods = pods_of(env)
    if pods.count > 1 and (not options.on_this_host or not isinstance(options.ppn, int)):
        raise InputError(
            f"{COUNT}={pods.count}: this is one of {pods.count} pods, which all need the same --ppn N, and no --hosts, "
            "--hostfile and --nodes"
        )
    return replace(options, pods=pods.count)


def in_pods(job: Job, env: Mapping[str, str]) -> Job:
    """The job of one host as this pod's part of a job. Raises InputError where its first pod is not named, or where the
    pods share no secret, by which their ranks know each other."""
    pods = pods_of(env)
    if pods.count == 1:
        return job
    if not job.master_addr:
        raise InputError(f"{COUNT}={pods.count}, but MASTER_ADDR does not name the first pod: set it for all pods")
    if not env.get(TOKEN_VARIABLE):
        raise InputError(f"{COUNT}={pods.count}, but {TOKEN_VARIABLE} is not set: set the same secret for all pods")
    secrets = ((TOKEN_VARIABLE, env[TOKEN_VARIABLE]),)
    return replace(job, pods=pods, master_port=port_of(env) or MASTER_PORT, secrets=secrets)


def wait_for_name(address: str, pods: Pods, limit_s: float = NAME_S) -> None:
    """Wait until the first pod has an address: its name appears when it is scheduled. Raises RunError at the limit."""
    if pods.count == 1:
        return
    deadline = time.monotonic() + limit_s
    while True:
        try:
            socket.getaddrinfo(address, None)
            return
        except socket.gaierror as error:
            if time.monotonic() > deadline:
                raise RunError(
                    f"the first pod, {address}, has no address after {limit_s:g} s ({error.strerror}): check "
                    "that it is scheduled, and that a headless Service has the name of the pods' subdomain"
                ) from None
        time.sleep(1)
