"""The options of mpiexec.hydra that Intel MPI and MPICH share."""

from cputrain.other_launchers.option import to, without
from cputrain.other_launchers.programs.reasons import BINDING, ENVIRONMENT, FABRIC, LABELS, LOGS

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
