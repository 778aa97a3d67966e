"""python -m torch.backends.xeon.run_cpu: the options of torch 2.13."""

from cputrain.other_launchers.option import Program, to, without
from cputrain.other_launchers.programs.reasons import BINDING

RUN_CPU = Program(
    name="run_cpu",
    title="torch.backends.xeon.run_cpu",
    called=(("run_cpu",),),
    modules=("torch.backends.xeon.run_cpu",),
    starts_python=True,
    options=(
        to("instances", "--ninstances"),
        to("instance", "--rank"),
        to("instances", "--latency-mode", takes=0, value="latency"),
        to("instances", "--throughput-mode", takes=0, value="throughput"),
        to("instances", "--multi-instance", takes=0, value="throughput"),
        to("threads", "--ncores-per-instance"),
        to("cores", "--core-list", why="run_cpu takes the numbers for those of cores and uses them as CPUs"),
        to("smt", "--use-logical-core", takes=0, value="on"),
        to("allocator", "--enable-tcmalloc", takes=0, value="tcmalloc"),
        to("allocator", "--enable-jemalloc", takes=0, value="jemalloc"),
        to("allocator", "--use-default-allocator", takes=0, value="glibc"),
        to("openmp", "--disable-iomp", takes=0, value="libgomp"),
        to("module", "-m", "--module", takes=0),
        to("no_python", "--no-python", takes=0),
        to("output", "--log-path", why="a new folder, with plan.json and logs/"),
        without("start launch under numactl --cpunodebind=N: the plan stays inside", "--node-id"),
        without("no worker crosses a NUMA node where that can be avoided", "--skip-cross-node-cores", takes=0),
        without(BINDING, "--disable-numactl", "--disable-taskset", takes=0),
        without("logs are named after the ranks", "--log-file-prefix"),
    ),
)
