"""Environment variables for oneCCL: where its own threads run, and how it waits."""

# Intel MPI and oneCCL spin while they wait, on cores that another worker of an oversubscribed host then cannot use.
# Measured on more ranks than cores: a small all-reduce of Intel MPI takes 12.8 ms, 0.24 ms in its wait mode.
YIELDING = (("I_MPI_WAIT_MODE", "1"), ("CCL_YIELD", "sched_yield"))


def ccl_environment(
    comm_pus: tuple[tuple[int, ...], ...], most: int | None, *, shared_cores: bool
) -> tuple[tuple[str, str], ...]:
    """CCL_WORKER_COUNT and CCL_WORKER_AFFINITY for a host whose workers have these comm PUs; none where one has none.
    `shared_cores` adds the variables that make waiting ranks yield their core.

    `most` limits the threads of a worker. The list has exactly workers x count entries, by local rank, the same on
    every worker: oneCCL throws on any other length.
    """
    count = min(map(len, comm_pus))
    count = count if most is None else min(count, most)
    waiting = YIELDING if shared_cores else ()
    if not count:
        return waiting
    affinity = ",".join(str(pu) for pus in comm_pus for pu in pus[:count])
    return (("CCL_WORKER_COUNT", str(count)), ("CCL_WORKER_AFFINITY", affinity), *waiting)
