"""The options of each launcher, one file each."""

from cputrain.other_launchers.programs.accelerate import ACCELERATE
from cputrain.other_launchers.programs.deepspeed import DEEPSPEED
from cputrain.other_launchers.programs.horovodrun import HOROVODRUN
from cputrain.other_launchers.programs.intelmpi import INTELMPI
from cputrain.other_launchers.programs.ipexrun import IPEXRUN
from cputrain.other_launchers.programs.mpich import MPICH
from cputrain.other_launchers.programs.openmpi import OPENMPI
from cputrain.other_launchers.programs.run_cpu import RUN_CPU
from cputrain.other_launchers.programs.srun import SRUN
from cputrain.other_launchers.programs.torchrun import TORCHRUN

PROGRAMS = {
    program.name: program
    for program in (IPEXRUN, TORCHRUN, RUN_CPU, HOROVODRUN, INTELMPI, OPENMPI, MPICH, SRUN, ACCELERATE, DEEPSPEED)
}
