"""Where oneCCL's own threads run, as its environment variables say it."""


def ccl_environment(comm_pus: tuple[tuple[int, ...], ...], most: int | None) -> tuple[tuple[str, str], ...]:
    """CCL_WORKER_COUNT and CCL_WORKER_AFFINITY for a host whose workers have these comm PUs; none where one has none.

    `most` limits the threads of a worker. The list has exactly workers x count entries, by local rank, the same on
    every worker: oneCCL throws on any other length.
    """
    count = min(map(len, comm_pus))
    count = count if most is None else min(count, most)
    if not count:
        return ()
    affinity = ",".join(str(pu) for pus in comm_pus for pu in pus[:count])
    return (("CCL_WORKER_COUNT", str(count)), ("CCL_WORKER_AFFINITY", affinity))
