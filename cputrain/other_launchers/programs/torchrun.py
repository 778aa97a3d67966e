"""torchrun, also as python -m torch.distributed.run or torch.distributed.launch: the options of torch 2.13."""

from cputrain.other_launchers.option import Program, to, without
from cputrain.other_launchers.programs.reasons import BINDING, LABELS, LOGS, MEETING, ONE_CALL, PORT

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
