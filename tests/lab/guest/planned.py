"""What a plan of an emulated machine must have, whatever the rules decide."""

from tests.lab.guest.scene import Scene

UNEVEN = 2  # the largest worker's threads over the smallest's


def workers(scene: Scene) -> None:
    """The rules choose the workers that suit the topology."""
    core_of = {pu: core for core in scene.machine.cores for pu in core.pus}
    cores = tuple(len({core_of[pu] for pu in worker.pus}) for worker in scene.plan.workers)
    assert cores == scene.topology.workers, f"workers of {cores} cores"


def domains(scene: Scene) -> None:
    """No worker crosses a NUMA node while there are nodes enough; no two share a core; none uses an offline CPU."""
    node_of = {pu: core.numa_node for core in scene.machine.cores for pu in core.pus}
    core_of = {pu: i for i, core in enumerate(scene.machine.cores) for pu in core.pus}
    used: set[int] = set()
    for worker in scene.plan.workers:
        cores = {core_of[pu] for pu in worker.pus}
        assert not cores & used, f"worker {worker.local_rank} shares a core"
        used |= cores
        if len(scene.plan.workers) >= len(scene.cpu_nodes):
            assert len({node_of[pu] for pu in worker.pus}) == 1, f"worker {worker.local_rank} crosses nodes"


def even_workers(scene: Scene) -> None:
    """With one local batch for all, no worker has less than half the threads of another, and none a single one beside
    larger ones."""
    threads = [worker.intra_op for worker in scene.plan.workers]
    assert max(threads) <= UNEVEN * min(threads), f"workers of {threads} threads at one local batch"


def memory(scene: Scene) -> None:
    """Workers use fast memory beside them, else their own node's; never slow memory, nor memory that nothing is known
    of."""
    wanted = {node.id: emulated for emulated, node in zip(scene.topology.nodes, scene.machine.numa_nodes, strict=True)}
    node_of = {pu: core.numa_node for core in scene.machine.cores for pu in core.pus}
    for worker in scene.plan.workers:
        own = {node_of[pu] for pu in worker.pus}
        fast = {i for i, node in wanted.items() if node.kind == "hbm" and node.beside in own}
        used = {wanted[i].kind for i in worker.memory_nodes}
        where = f"worker {worker.local_rank} uses nodes {worker.memory_nodes}"
        assert not used & {"slow", "unknown"}, f"{where}: {used}"
        assert not fast or fast & {*worker.memory_nodes}, f"{where}, not the fast {fast}"
        assert worker.memory_policy != "interleave" or len(used) == 1, f"{where} in turn: {used}"
