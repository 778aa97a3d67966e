"""accelerate launch: the options of Accelerate 1.15."""

from cputrain.other_launchers.option import Program, to, without
from cputrain.other_launchers.programs.reasons import BINDING, LOGS, MEETING, ONE_CALL, PORT

SCRIPT = "give it to Accelerator(...) in the script: launch starts any script and passes nothing on"
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
        without(SCRIPT, "--use-deepspeed", "--use-fsdp", "--use-parallelism-config", "--use-megatron-lm", takes=0),
        without(SCRIPT, "--dynamo-use-*", takes=0),
        without(SCRIPT, "--fp8-use-autocast-during-eval", takes=0),
        without(SCRIPT, "--fp8-*", "--fsdp-*", "--megatron-lm-*", "--parallelism-config-*", "--deepspeed-*"),
        without(SCRIPT, "--zero-stage", "--zero3-*", "--offload-*", "--gradient-clipping"),
    ),
)
