"""Images per step of each worker."""

from math import ceil

from affinity.planner.domains import Domain


def most_per_pass(local_batch: int, global_batch: int | None, workers: int) -> int:
    """Images of a worker's largest backward pass: `local_batch`, or less where equal shares of a global batch over all
    workers need as few passes with less."""
    if global_batch is None:
        return local_batch
    passes = ceil(global_batch / (workers * local_batch))
    return ceil(ceil(global_batch / workers) / passes)


def local_batches(
    domains: tuple[Domain, ...], threads: tuple[int, ...], local_batch: int | None, *, proportional: bool
) -> tuple[int | None, ...]:
    """Images per step of each worker, local_batch on average, exactly local_batch x workers together.

    `proportional`: in proportion to what each worker's threads compute, at least 1, by largest remainders.
    """
    if local_batch is None or not proportional:
        return (local_batch,) * len(domains)
    speeds = [domain.cores[0].speed * count for domain, count in zip(domains, threads, strict=True)]
    total = local_batch * len(domains)
    exact = [total * speed / sum(speeds) for speed in speeds]
    batches = [max(1, int(share)) for share in exact]
    by_remainder = sorted(range(len(exact)), key=lambda i: (batches[i] - exact[i], i))
    for i in by_remainder[: max(0, total - sum(batches))]:
        batches[i] += 1
    while sum(batches) > total:
        batches[max(range(len(batches)), key=lambda i: (batches[i], -i))] -= 1
    return tuple(batches)
