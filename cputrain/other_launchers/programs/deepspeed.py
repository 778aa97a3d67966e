"""deepspeed: the options of DeepSpeed 0.19's launcher."""

from cputrain.other_launchers.option import Program, to, without
from cputrain.other_launchers.programs.reasons import BINDING, MEETING, ONE_CALL, PORT

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
