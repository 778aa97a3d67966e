"""mpirun and mpiexec of MPICH: the options of 5.0."""

from cputrain.other_launchers.option import Program, without
from cputrain.other_launchers.programs.hydra import HYDRA, WITHOUT_MPI
from cputrain.other_launchers.programs.reasons import BINDING

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
