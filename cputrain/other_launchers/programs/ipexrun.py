"""ipexrun of Intel's extension for PyTorch, also as python -m intel_extension_for_pytorch.cpu.launch: the options of
its last release, 2.8, and those that it had deprecated."""

from cputrain.other_launchers.option import Program, to, without
from cputrain.other_launchers.programs.reasons import BINDING, MEETING, PORT

SCRIPT = "it changed the script's code: PyTorch's own bfloat16 (torch.autocast) and torch.compile replace it"

IPEXRUN = Program(
    name="ipexrun",
    title="ipexrun",
    called=(("ipexrun",),),
    modules=("intel_extension_for_pytorch.cpu.launch", "intel_extension_for_pytorch.launch"),
    starts_python=True,
    remark="import intel_extension_for_pytorch ended at PyTorch 2.8: remove it from the script",
    options=(
        to("nodes", "--nnodes"),
        to("ppn", "--nprocs-per-node", "--nproc-per-node"),
        to("distributed", "--distributed", takes=0, value="on"),
        to("comm_cores", "--ccl-worker-count"),
        to("hostfile", "--hostfile"),
        to("instances", "--ninstances"),
        to("instance", "--instance-idx"),
        to("instances", "--latency-mode", takes=0, value="latency"),
        to("instances", "--throughput-mode", takes=0, value="throughput"),
        to("threads", "--ncores-per-instance", "--ncore-per-instance"),
        to("cores", "--cores-list", "--core-list"),
        to("smt", "--use-logical-cores", "--use-logical-core", takes=0, value="on"),
        to("allocator", "--memory-allocator", why="default: glibc", when="default"),
        to("allocator", "--enable-tcmalloc", takes=0, value="tcmalloc"),
        to("allocator", "--enable-jemalloc", takes=0, value="jemalloc"),
        to("allocator", "--use-default-allocator", takes=0, value="glibc"),
        to("openmp", "--omp-runtime", why="intel: libiomp5; default: libgomp", when="intel|default"),
        to("openmp", "--disable-iomp", takes=0, value="libgomp"),
        to("module", "-m", "--module", takes=0),
        to("no_python", "--no-python", takes=0),
        to("output", "--log-dir", "--log-path", why="a new folder, with plan.json and logs/"),
        without(
            "--profile mlperf-spr puts oneCCL's threads on second hardware threads",
            *("--logical-cores-for-ccl", "--logical-core-for-ccl"),
            takes=0,
        ),
        without("start launch under numactl --cpunodebind=LIST: the plan stays inside", "--nodes-list", "--node-id"),
        without("slower cores compute where that is faster; --e-cores off leaves them out", "--use-e-cores", takes=0),
        without("no worker crosses a NUMA node where that can be avoided", "--bind-numa-node", takes=0),
        without("no worker crosses a NUMA node where that can be avoided", "--skip-cross-node-cores", takes=0),
        without("cores are divided along NUMA nodes and caches", "--strategy"),
        without(BINDING, "--multi-task-manager"),
        without(BINDING, "--disable-numactl", "--disable-taskset", takes=0),
        without("logs are named after the ranks", "--log-file-prefix"),
        without("jemalloc keeps freed memory in any case", "--benchmark", takes=0),
        without(MEETING, "--master-addr"),
        without(PORT, "--master-port"),
        without("give mpirun's options to cputrain import alone", "--extra-mpi-params", "--more-mpi-params"),
        without("--ninstances says it", "--multi-instance", takes=0),
        without(SCRIPT, "--auto-ipex", "--auto-ipex-verbose", "--disable-ipex-graph-mode", takes=0),
        without(SCRIPT, "--dtype"),
    ),
)
