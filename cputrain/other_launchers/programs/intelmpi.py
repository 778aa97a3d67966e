"""mpirun and mpiexec.hydra of Intel MPI: the options of 2021.17."""

from cputrain.other_launchers.option import Program, to, without
from cputrain.other_launchers.programs.hydra import HYDRA, WITHOUT_MPI
from cputrain.other_launchers.programs.reasons import BINDING, LABELS, TOOLS

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
