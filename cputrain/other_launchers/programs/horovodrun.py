"""horovodrun: the options of Horovod 0.28."""

from cputrain.other_launchers.option import Program, to, without
from cputrain.other_launchers.programs.reasons import BINDING, FABRIC, LABELS

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
