"""mpirun, mpiexec and orterun of Open MPI: the options of 4.1 and 5.0."""

from cputrain.other_launchers.option import Program, parts_to, to, without
from cputrain.other_launchers.programs.hydra import WITHOUT_MPI
from cputrain.other_launchers.programs.reasons import BINDING, FABRIC, LABELS, LOGS

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
