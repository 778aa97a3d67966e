"""srun: the options of Slurm 22.05."""

from cputrain.other_launchers.option import Program, parts_to, to, without
from cputrain.other_launchers.programs.reasons import BINDING, ENVIRONMENT, FABRIC, LABELS, LOGS

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
