"""The options of each program that launches trainings, as tables.

ipexrun's are those of its last release, 2.8, and those that it had deprecated.
"""

from cputrain.other_launchers.option import Program, parts_to, to, without

BINDING = "the plan binds the ranks: cputrain plan shows how"
ONE_CALL = "launch is called once, for all hosts"
MEETING = "the ranks meet on the first host: export MASTER_ADDR to choose another address"
PORT = "launch chooses a free port: export MASTER_PORT to fix it"
LOGS = "each rank has a log of its own, logs/rank-N.log in the launch's folder"
LABELS = "the output of each rank is labeled with its number"
FABRIC = "the network decides which variables are set: give --fabric to choose another"
ENVIRONMENT = "the ranks inherit the environment"
TOOLS = "start the tool in front of the command: -- TOOL CMD"


WITHOUT_MPI = (
    "without --launcher, launch starts the ranks on this host without an MPI: a program that calls MPI_Init needs it"
)
HYDRA = (
    to("ranks", "-n", "-np"),
    to("ppn", "-ppn", "-perhost"),
    to("hosts", "-hosts", "-host"),
    to("hostfile", "-f", "-hostfile", "-machinefile", "-machine"),
    to("environment", "-genv", "-env", takes=2, value="{}={}"),
    to("folder", "-wdir"),
    without(ENVIRONMENT, "-genvall", "-envall", takes=0),
    without(ENVIRONMENT + ": unset what they should not have", "-genvnone", "-envnone", takes=0),
    without(ENVIRONMENT, "-genvlist", "-envlist", "-genvexcl", "-envexcl"),
    without("launch writes a command for the launcher that is there: --launcher", "-launcher", "-launcher-exec"),
    without("launch writes a command for the launcher that is there: --launcher", "-bootstrap", "-bootstrap-exec"),
    without("the hosts of a Slurm or PBS job are taken from it", "-rmk"),
    without("X is not forwarded", "-enable-x", "-disable-x", takes=0),
    without(LABELS, "-prepend-rank", "-l", takes=0),
    without(LABELS, "-prepend-pattern"),
    without(LOGS, "-outfile-pattern", "-errfile-pattern", "-outfile", "-errfile"),
    without("a rank that fails is named with its status", "-print-all-exitcodes", takes=0),
    without("launch ends all ranks when one fails", "-disable-auto-cleanup", takes=0),
    without("launch prints what it does", "-verbose", "-v", "-info", "-version", takes=0),
    without("hosts are named as they are listed", "-disable-hostname-propagation", takes=0),
    without("hosts are named as they are listed", "-localhost"),
    without(FABRIC, "-iface"),
    without("MPI programs that start others need mpirun itself", "-nameserver", "-usize"),
    without("several programs in one job are not supported", "-configfile"),
    without(BINDING, "-rankmap"),
)


IN_THE_SCRIPT = "give it to Accelerator(...) in the script: launch starts any script and passes nothing on"
CPUS = "cputrain starts processes on CPUs"

ACCELERATE = Program(
    name="accelerate",
    title="accelerate launch",
    called=(("accelerate", "launch"), ("accelerate-launch",)),
    modules=("accelerate.commands.launch",),
    starts_python=True,
    remark_without_ranks="accelerate launch without --num_processes starts the number that its configuration file has, "
    "else one; without --ppn the plan decides",
    options=(
        to("ranks", "--num-processes"),
        to("nodes", "--num-machines"),
        to("threads", "--num-cpu-threads-per-process"),
        to("environment", "--cpu", takes=0, value="ACCELERATE_USE_CPU=true"),
        to("environment", "--mixed-precision", value="ACCELERATE_MIXED_PRECISION={}"),
        to("environment", "--gradient-accumulation-steps", value="ACCELERATE_GRADIENT_ACCUMULATION_STEPS={}"),
        to("environment", "--dynamo-backend", value="ACCELERATE_DYNAMO_BACKEND={}"),
        to("environment", "--dynamo-mode", value="ACCELERATE_DYNAMO_MODE={}"),
        to("hostfile", "--mpirun-hostfile", "--deepspeed-hostfile"),
        to("comm_cores", "--mpirun-ccl"),
        to("restarts", "--max-restarts"),
        to("output", "--log-dir", why="a new folder, with plan.json and logs/"),
        to("module", "-m", "--module", takes=0),
        to("no_python", "--no-python", takes=0),
        without("its settings are not read: write them into the command", "--config-file"),
        without(ONE_CALL, "--machine-rank", "--rdzv-backend", "--rdzv-conf"),
        without(ONE_CALL, "--same-network", takes=0),
        without(MEETING, "--main-process-ip"),
        without(PORT, "--main-process-port"),
        without(BINDING, "--enable-cpu-affinity", takes=0),
        without("Intel's extension ended at PyTorch 2.8", "--ipex", "--use-ipex", takes=0),
        without(CPUS, "--use-xpu", "--use-mps-device", takes=0),
        without(LOGS, "-t", "--tee"),
        without("ranks have no roles", "--role"),
        without("launch notices the end of a rank at once", "--monitor-interval"),
        without(CPUS, "--multi-gpu", "--tpu", "--tpu-cluster", "--no-tpu-cluster", "--tpu-use-sudo", takes=0),
        without(CPUS, "--gpu-ids", "--vm", "--env", "--main-training-function"),
        without(CPUS, "--downcast-bf16", takes=0),
        without("cputrain job writes scripts for clusters", "--aws-access-key-id", "--aws-secret-access-key"),
        without("a failure is reported in one line", "-q", "--quiet", "--debug", takes=0),
        without(
            IN_THE_SCRIPT, "--use-deepspeed", "--use-fsdp", "--use-parallelism-config", "--use-megatron-lm", takes=0
        ),
        without(IN_THE_SCRIPT, "--dynamo-use-*", takes=0),
        without(IN_THE_SCRIPT, "--fp8-use-autocast-during-eval", takes=0),
        without(IN_THE_SCRIPT, "--fp8-*", "--fsdp-*", "--megatron-lm-*", "--parallelism-config-*", "--deepspeed-*"),
        without(IN_THE_SCRIPT, "--zero-stage", "--zero3-*", "--offload-*", "--gradient-clipping"),
    ),
)


HOSTS = "the hosts of the hostfile are used, with --ppn workers on each: leave the others out of it"

DEEPSPEED = Program(
    name="deepspeed",
    title="deepspeed",
    called=(("deepspeed",), ("ds",)),
    modules=("deepspeed.launcher.runner",),
    starts_python=True,
    remark_without_ranks="deepspeed without --num_accelerators starts a process for each NUMA node of a host; without "
    "--ppn the plan decides",
    options=(
        to("ppn", "--num-accelerators", "--num-gpus"),
        to("nodes", "--num-nodes"),
        to("hostfile", "-H", "--hostfile"),
        to("cores", "--bind-core-list"),
        to("output", "--enable-each-rank-log", why="a new folder, with plan.json and logs/"),
        to("module", "--module", takes=0),
        to("no_python", "--no-python", takes=0),
        without(BINDING, "--bind-cores-to-rank", takes=0),
        without("the script gets no --local_rank: it reads LOCAL_RANK", "--no-local-rank", takes=0),
        without(HOSTS, "-i", "--include", "-e", "--exclude"),
        without(ONE_CALL, "--node-rank"),
        without(ONE_CALL, "--no-ssh", "--force-multi", takes=0),
        without(MEETING, "--master-addr"),
        without(PORT, "--master-port"),
        without("the MPI that is installed starts the ranks: give --launcher to choose", "--launcher"),
        without("give the launcher's options to cputrain import alone", "--launcher-args"),
        without("ssh's own configuration decides: set it for these hosts in ~/.ssh/config", "--ssh-port"),
        without("the hosts are checked at every start: --no-preflight leaves it out", "--no-ssh-check", takes=0),
        without("the ranks get the environment that launch has", "--venv-script"),
        without("end the job by a signal to cputrain launch, which ends its ranks", "--save-pid", takes=0),
        without("cputrain tune measures plans; DeepSpeed's own settings stay as they are", "--autotuning"),
        without("launch prints what it does", "-q", "--quiet", takes=0),
        without("launch prints what it does", "--log-level"),
        without("a job has a fixed number of ranks", "--elastic-training", takes=0),
        without("a job has a fixed number of ranks", "--min-elastic-nodes", "--max-elastic-nodes"),
    ),
)


TUNING = "DDP sums gradients in buckets of its own: bucket_cap_mb, or comm.bucket_mib of a recipe"
ELASTIC = "a job has a fixed number of ranks, and --restarts goes on without lost hosts"
STALLS = "launch names ranks that keep others waiting by itself"
TIMELINE = "cputrain bench model --trace writes a trace of a step"
SSH = "ssh's own configuration decides: set it for these hosts in ~/.ssh/config"
BACKEND = "the script chooses the backend of torch.distributed: gloo or ccl"

HOROVODRUN = Program(
    name="horovodrun",
    title="horovodrun",
    called=(("horovodrun",),),
    remark="hvd.init() finds its ranks through MPI only: add --launcher openmpi, or change the script to DDP",
    options=(
        to("ranks", "-np", "--num-proc"),
        to("hosts", "-H", "--hosts"),
        to("hostfile", "--hostfile"),
        to("output", "--output-filename", why="a new folder, with plan.json and logs/"),
        without(SSH, "-p", "--ssh-port", "-i", "--ssh-identity-file"),
        without(
            "gloo takes the interface of the route to rank 0: export GLOO_SOCKET_IFNAME to choose another",
            *("--network-interface", "--network-interfaces"),
        ),
        without(LABELS, "-prefix-timestamp", "--prefix-output-with-timestamp", takes=0),
        without("cputrain doctor tells what is installed", "-cb", "--check-build", takes=0),
        without("the hosts are checked at every start: --no-preflight leaves it out", "--disable-cache", takes=0),
        without("the ranks wait for each other as long as the script's process group does", "--start-timeout"),
        without("the script's process group has it: init_process_group(timeout=)", "--gloo-timeout-seconds"),
        without(BACKEND, "--gloo", "--mpi", "--jsrun", "--tcp", "--mpi-threads-disable", takes=0),
        without(BACKEND, "--no-mpi-threads-disable", takes=0),
        without("give mpirun's options to cputrain import alone", "--mpi-args"),
        without(BINDING, "--binding-args", "--thread-affinity"),
        without(FABRIC, "--num-nccl-streams"),
        without("launch prints what it does", "--verbose", takes=0),
        without("write the options into the command", "--config-file"),
        without(TUNING, "--fusion-threshold-mb", "--cycle-time-ms", "--cache-capacity"),
        without(TUNING, "--hierarchical-allreduce", "--no-hierarchical-allreduce", takes=0),
        without(TUNING, "--hierarchical-allgather", "--no-hierarchical-allgather", takes=0),
        without(TUNING, "--autotune", "--no-autotune", takes=0),
        without(TUNING, "--autotune-*"),
        without(ELASTIC, "--min-np", "--min-num-proc", "--max-np", "--max-num-proc", "--slots-per-host"),
        without(ELASTIC, "--elastic-timeout", "--reset-limit", "--host-discovery-script"),
        without(ELASTIC, "--blacklist-cooldown-range", takes=2),
        without(TIMELINE, "--timeline-filename"),
        without(TIMELINE, "--timeline-mark-cycles", "--no-timeline-mark-cycles", takes=0),
        without(STALLS, "--no-stall-check", "--stall-check", takes=0),
        without(STALLS, "--stall-check-warning-time-seconds", "--stall-check-shutdown-time-seconds"),
        without("Horovod's own messages", "--log-level"),
        without("Horovod's own messages", "--log-with-timestamp", "--log-without-timestamp", takes=0),
        without("Horovod's own messages", "--log-hide-timestamp", "--no-log-hide-timestamp", takes=0),
    ),
)


INTELMPI = Program(
    name="intelmpi",
    title="mpirun of Intel MPI",
    called=(("mpirun",), ("mpiexec",), ("mpiexec.hydra",)),
    remark_on_one_host=f"{WITHOUT_MPI} (--launcher intelmpi)",
    options=(
        *HYDRA,
        to("ppn", "-grr"),
        to("ppn", "-rr", takes=0, value="1"),
        to("dry_run", "-print-rank-map", takes=0, why="--dry-run shows each worker's CPUs, and starts nothing"),
        without("name the hosts with --hosts n[1-4]", "-hosts-group"),
        without(BINDING, "-cpu-bind"),
        without(TOOLS, "-aps", "-mps", "-gdb", takes=0),
        without(TOOLS, "-gtool", "-gtoolfile", "-gdb-args"),
        without("no rank reads standard input", "-s"),
        without("a failure is reported in one line", "-silent-abort", takes=0),
        without("leave this host out of --hosts", "-nolocal", takes=0),
        without("export I_MPI_TUNING_BIN", "-tune"),
        without(LABELS, "-prepend-timestamp", takes=0),
        without("export I_MPI_DEBUG=3", "-prot", takes=0),
    ),
)


CHANGED_SCRIPT = "it changed the script's code: PyTorch's own bfloat16 (torch.autocast) and torch.compile replace it"

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
        without(CHANGED_SCRIPT, "--auto-ipex", "--auto-ipex-verbose", "--disable-ipex-graph-mode", takes=0),
        without(CHANGED_SCRIPT, "--dtype"),
    ),
)


MPICH = Program(
    name="mpich",
    title="mpirun of MPICH",
    called=(("mpirun",), ("mpiexec",), ("mpiexec.hydra",)),
    remark_on_one_host=f"{WITHOUT_MPI} (--launcher mpich)",
    options=(
        *HYDRA,
        without(BINDING, "-bind-to", "-map-by", "-membind", "-topolib", "-order-nodes"),
        without("no rank has a GPU", "-gpus-per-proc"),
        without("memory is chosen by the plan", "-memory-alloc-kinds"),
        without("MPICH's own", "-demux"),
        without("MPICH's own", "-pmi-port", "-profile", takes=0),
        without("all hosts need the same paths", "-hybrid-hosts", takes=0),
        without("leave this host out of --hosts", "-skip-launch-node", takes=0),
    ),
)


OWN = "Open MPI's own: --launcher openmpi starts the ranks through it"
PARAMETERS = "--fabric sets the network's; export others as OMPI_MCA_NAME, PRTE_MCA_NAME or PMIX_MCA_NAME"
DEBUG = "Open MPI's own messages"
PLACEMENT = (("ppn", r"\b([0-9]+):node\b"), ("threads", r"\bpe=([0-9]+)"))  # of ppr:2:node:PE=4

OPENMPI = Program(
    name="openmpi",
    title="mpirun of Open MPI",
    called=(("mpirun",), ("mpiexec",), ("orterun",), ("prterun",), ("mpirun.openmpi",)),
    remark_on_one_host=f"{WITHOUT_MPI} (--launcher openmpi)",
    options=(
        to("ranks", "-n", "-np", "-c"),
        to("ppn", "-N", "-npernode"),
        to("ppn", "-pernode", takes=0, value="1"),
        parts_to(
            PLACEMENT,
            *("-map-by", "-ppr"),
            why=f"{BINDING}; for ppr:N:package or ppr:N:numa give --ppn, N times their number on a host",
            understood=r"\b(ppr|slot|core)\b",
        ),
        to("hosts", "-H", "-host"),
        to("hostfile", "-hostfile", "-machinefile", "-default-hostfile"),
        to("environment", "-x", why="NAME alone: the ranks inherit it", when=""),
        to("folder", "-wdir", "-wd"),
        to("output", "-output-filename", why="a new folder, with plan.json and logs/"),
        to("dry_run", "-do-not-launch", "-display-map", takes=0, why="--dry-run shows each worker's CPUs"),
        to("restarts", "-max-restarts"),
        without(BINDING, "-bind-to", "-rank-by", "-rf", "-rankfile", "-cpu-set", "-cpu-list"),
        without(BINDING, "-npersocket", "-cpus-per-proc", "-cpus-per-rank", "-cf", "-cartofile"),
        without(BINDING, "-bind-to-core", "-bind-to-socket", "-bycore", "-bynode", "-byslot", takes=0),
        without("--smt on computes on second hardware threads", "-use-hwthread-cpus", takes=0),
        without("each rank checks its binding; plan and --dry-run show it", "-report-bindings", takes=0),
        without("--oversubscribe where ranks should share cores", "-oversubscribe", takes=0),
        without("ranks never share cores without --oversubscribe", "-nooversubscribe", takes=0),
        without("launch adds it where it is needed", "-allow-run-as-root", takes=0),
        without("launch adds it where it is needed", "-prefix"),
        without("launch adds it where it is needed", "-noprefix", takes=0),
        without(PARAMETERS, "-mca", "-gmca", "-omca", "-prtemca", "-pmixmca", "-gpmixmca", takes=2),
        without(FABRIC, "-am", "-tune"),
        without(LABELS, "-tag-output", "-timestamp-output", takes=0),
        without(LOGS, "-output", "-xterm", "-xml-file"),
        without(LOGS, "-merge-stderr-to-stdout", "-xml", takes=0),
        without("--dry-run shows the plan and the command", "-display"),
        without("leave this host out of --hosts", "-nolocal", takes=0),
        without("start launch under timeout(1)", "-timeout"),
        without("no rank reads standard input", "-stdin"),
        without("launch prints what it does", "-q", "-quiet", "-v", "-verbose", "-V", "-version", takes=0),
        without("several programs in one job are not supported", "-app"),
        without(OWN, "-launch-agent", "-path", "-preload-files", "-personality", "-runtime-options", "-dvm-uri"),
        without(OWN, "-hnp", "-ompi-server", "-max-vm-size", "-report-uri", "-report-pid", "-report-events"),
        without(OWN, "-dvm", "-novm", "-do-not-resolve", "-use-regexp", "-fwd-mpirun-port", takes=0),
        without(OWN, "-enable-recovery", "-disable-recovery", "-continuous", "-index-argv-by-rank", takes=0),
        without(OWN, "-set-cwd-to-session-dir", "-enable-instant-on-support", takes=0),
        without(OWN, "-report-child-jobs-separately", "-s", "-preload-binary", takes=0),
        without(DEBUG, "-show-progress", "-d", "-debug-devel", takes=0),
        without(DEBUG, "-debug", "-debug-daemons", "-debug-daemons-file", "-leave-session-attached", "-tv", takes=0),
        without(DEBUG, "-display-allocation", "-display-devel-allocation", "-display-devel-map", takes=0),
        without(DEBUG, "-display-diffable-map", "-display-topo", "-get-stack-traces", takes=0),
        without(DEBUG, "-report-state-on-timeout", "-output-proctable", takes=0),
        without(DEBUG, "-debugger"),
    ),
)


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


JOB = "cputrain job slurm -- CMD writes a job script, with --partition, --time and the rest"
STEP = "launch starts one step on all hosts of the job"
CONTAINER = "start the container's program: -- apptainer exec IMAGE CMD"
GPUS = "cputrain starts processes on CPUs"
NODES = (("hosts", "^([^/]+)$"), ("hostfile", "^(.*/.*)$"))  # srun takes a name with a slash for a file
VARIABLES = (("environment", r"(?<![^,])([A-Za-z_][A-Za-z0-9_]*=[^,']*)(?![^,])"),)  # in quotes: values with commas

SRUN = Program(
    name="srun",
    title="srun",
    called=(("srun",),),
    joins_letters=True,
    remark_on_one_host="srun starts its ranks on all hosts of its job: --ppn is the number on each",
    options=(
        to("ranks", "-n", "--ntasks"),
        to("nodes", "-N", "--nodes", why="of MIN-MAX the most", when=".*-.*"),
        to("ppn", "--ntasks-per-node"),
        to(
            "threads",
            *("-c", "--cpus-per-task"),
            why="srun counts hardware threads, --threads cores: give half where a core has two",
        ),
        parts_to(NODES, "-w", "--nodelist", why="give --hosts n[1-4]"),
        to("folder", "-D", "--chdir"),
        parts_to((("smt", "^(2)$"),), "--threads-per-core", why="one hardware thread of each core computes"),
        parts_to(
            (("smt", "^(multithread)$"),), "--hint", why="one hardware thread of each core computes, on all cores"
        ),
        without(
            BINDING, "--cpu-bind", "--mem-bind", "-m", "--distribution", "--ntasks-per-core", "--ntasks-per-socket"
        ),
        without(BINDING, "-B", "--extra-node-info", "--sockets-per-node", "--cores-per-socket"),
        without("the plan leaves them out where Slurm does", "-S", "--core-spec", "--thread-spec"),
        parts_to(VARIABLES, "--export", why=ENVIRONMENT, when=r"(?!.*\bALL\b).*", understood=r"\bALL\b"),
        without(LOGS, "-o", "--output", "-e", "--error"),
        without(LABELS, "-l", "--label", "-u", "--unbuffered", takes=0),
        without("no rank reads standard input", "-i", "--input"),
        without("no rank has a terminal", "--pty", takes=0),
        without("launch prints what it does", "-v", "--verbose", "-Q", "--quiet", "-X", "--disable-status", takes=0),
        without("launch prints what it does", "--slurmd-debug"),
        without("launch ends all ranks when one fails", "-K", "--kill-on-bad-exit", "-k", "--no-kill", takes=0),
        without("launch ends all ranks when one fails", "-W", "--wait"),
        without("SIGTERM and SIGINT end all ranks, SIGUSR1 is passed on", "--signal"),
        without("SIGTERM and SIGINT end all ranks, SIGUSR1 is passed on", "--quit-on-interrupt", takes=0),
        without("--launcher srun calls it with the --mpi that the installation needs", "--mpi"),
        without("ranks meet over PyTorch's store, and launch chooses its port", "--resv-ports", takes=0),
        without(FABRIC, "--switches"),
        without("several programs in one job are not supported", "--multi-prog", takes=0),
        without("several programs in one job are not supported", "--het-group"),
        without("name the hosts with --hosts n[1-4]", "-x", "--exclude", "-r", "--relative"),
        without("--oversubscribe where ranks should share cores", "-O", "--overcommit", takes=0),
        without(STEP, "--jobid", "-T", "--threads", "--task-prolog", "--task-epilog", "--prolog", "--epilog"),
        without(STEP, "--exact", "--overlap", "-E", "--preserve-env", "-Z", "--no-allocate", takes=0),
        without(STEP, "--bcast", "--bcast-exclude", "--compress", "--send-libs", "--propagate", takes=0),
        without(CONTAINER, "--container", "--container-image", "--container-name", "--container-mounts"),
        without(CONTAINER, "--container-workdir", "--container-save", "--container-env"),
        without(CONTAINER, "--container-mount-home", "--no-container-mount-home", takes=0),
        without(CONTAINER, "--container-writable", "--container-readonly", "--container-remap-root", takes=0),
        without(JOB, "-A", "--account", "-p", "--partition", "-q", "--qos", "-t", "--time", "--time-min"),
        without(JOB, "-J", "--job-name", "-C", "--constraint", "--cluster-constraint", "--reservation", "-M"),
        without(JOB, "--mem", "--mem-per-cpu", "--mincpus", "--tmp", "-L", "--licenses", "-d", "--dependency"),
        without(
            JOB, "-b", "--begin", "--deadline", "--delay-boot", "--comment", "--mail-type", "--mail-user", "--wckey"
        ),
        without(JOB, "--clusters", "--priority", "--mcs-label", "--bb", "--bbf", "--acctg-freq", "--profile"),
        without(JOB, "--cpu-freq", "--power", "--gres", "--gres-flags"),
        without(JOB, "-H", "--hold", "-I", "--immediate", "--nice", "--reboot", "--contiguous", takes=0),
        without(JOB, "--exclusive", "-s", "--oversubscribe", "--spread-job", "--use-min-nodes", takes=0),
        without(GPUS, "-G", "--gpus", "--gpus-per-node", "--gpus-per-task", "--gpus-per-socket", "--gpu-bind"),
        without(GPUS, "--gpu-freq", "--cpus-per-gpu", "--mem-per-gpu"),
    ),
)


TORCHRUN = Program(
    name="torchrun",
    title="torchrun",
    called=(("torchrun",),),
    modules=("torch.distributed.run", "torch.distributed.launch"),
    starts_python=True,
    remark_without_ranks="torchrun without --nproc-per-node starts one rank on each host; without --ppn the plan "
    "decides their number",
    options=(
        to(
            "nodes",
            "--nnodes",
            why="of MIN:MAX the most: a job has a fixed number of hosts, and --restarts goes on without lost ones",
            when=".*:.*",
        ),
        to("ppn", "--nproc-per-node", why="auto, cpu: the plan decides", when="[a-z]+"),
        to("module", "-m", "--module", takes=0),
        to("no_python", "--no-python", takes=0),
        to("restarts", "--max-restarts"),
        to("output", "--log-dir", why="a new folder, with plan.json and logs/"),
        without(ONE_CALL, "--node-rank"),
        without(ONE_CALL, "--rdzv-backend", "--rdzv-id", "--rdzv-conf"),
        without(MEETING, "--rdzv-endpoint", "--master-addr", "--local-addr"),
        without(PORT, "--master-port"),
        without("one host is the default", "--standalone", takes=0),
        without(BINDING, "--numa-binding"),
        without(LOGS, "-r", "--redirects", "-t", "--tee"),
        without(LABELS, "--local-ranks-filter", "--duplicate-stdout-filters", "--duplicate-stderr-filters"),
        without("launch notices the end of a rank at once", "--monitor-interval"),
        without("each rank is a program of its own", "--start-method"),
        without("ranks have no roles", "--role"),
        without("launch keeps no log of events", "--event-log-handler", "--logs-specs"),
        without("scripts are started, not loaded", "--run-path", takes=0),
        without("SIGTERM and SIGINT end all ranks, SIGUSR1 is passed on", "--signals-to-handle"),
        without("ranks have 90 s to save and end", "--shutdown-timeout"),
        without("LOCAL_RANK is always the rank's own", "--virtual-local-rank", takes=0),
        without("LOCAL_RANK is set, and no --local-rank is added to the command", "--use-env", takes=0),
    ),
)


PROGRAMS = {
    program.name: program
    for program in (IPEXRUN, TORCHRUN, RUN_CPU, HOROVODRUN, INTELMPI, OPENMPI, MPICH, SRUN, ACCELERATE, DEEPSPEED)
}
