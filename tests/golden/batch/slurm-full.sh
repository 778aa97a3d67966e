#!/bin/bash
#SBATCH --job-name=resnet50
#SBATCH --nodes=256
#SBATCH --ntasks-per-node=2
#SBATCH --cpus-per-task=48
#SBATCH --exclusive
#SBATCH --time=02:00:00
#SBATCH --partition=skx
#SBATCH --account=a1
#SBATCH --array=0-1
#SBATCH --signal=B:USR1@120
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=resnet50-%A_%a.out
set -euo pipefail

module load gcc/12
module load python
# shellcheck disable=SC1091  # not there where the script is checked
. '/home/me/my venv/bin/activate'

output=runs/resnet50
settings=(plan.threads=20 )
values=(16 32 )
settings+=(batch.local="${values[$SLURM_ARRAY_TASK_ID]}")
output="$output-$SLURM_ARRAY_TASK_ID"
settings+=("output=$output")
files="$output.job"
mkdir -p -- "$files"
cat > "$files/recipe.yaml" <<'END_OF_RECIPE'
name: resnet50
END_OF_RECIPE
container="$(command -v apptainer || command -v singularity)"
python=("$container" exec --bind "$PWD" 'image'"'"'s.sif' python)

# What an earlier job has done is gone on from; what it has finished is left alone.
resume=()
if [ -e "$output/events.jsonl" ]; then
    if grep -q '"status": "done"' "$output/events.jsonl"; then
        echo "$output is finished"
        exit 0
    fi
    resume=(--resume)
fi

# Made on the first host; every rank checks that its own host gave it just this.
"${python[@]}" -m cputrain plan "$files/recipe.yaml" "${settings[@]}" \
    --ppn 2 --nodes 256 --fabric opa --format json > "$files/plan.json"

MASTER_ADDR="$(hostname)"
MASTER_PORT=$((29500 + SLURM_JOB_ID % 1000))
export MASTER_ADDR MASTER_PORT
export TQDM_MININTERVAL=30  # nobody watches the bar: a line now and then
export FI_PROVIDER=psm2  # Omni-Path's own provider
export HFI_NO_CPUAFFINITY=1  # PSM2 would bind each rank by itself, against the plan
export PSM2_MULTI_EP=1  # MPI and oneCCL each open endpoints of their own
export I_MPI_FABRICS=shm:ofi  # shared memory inside a host, libfabric between hosts
export CCL_ALLREDUCE=rabenseifner  # assumed, not measured: for large gradients bandwidth decides

stage='/scratch/x y'/"$SLURM_JOB_ID"
each_host=(srun --nodes=256 --ntasks=256 --ntasks-per-node=1)
# shellcheck disable=SC2016  # expanded by the shell on each host
"${each_host[@]}" sh -c 'mkdir -p -- "$1" && cp -R -- "$2"/. "$1"' stage "$stage" /data/imagenet
unstage() { "${each_host[@]}" rm -rf -- "$stage" || true; }
trap unstage EXIT
settings+=("data.path=$stage")
# The time is nearly up: the ranks save their state and end; this job is queued again and goes on from there.
requeue() {
    echo "time limit: requeued, to go on from the last checkpoint"
    kill -USR1 "$ranks" 2> /dev/null || true
    for ((i = 0; i < 90; i++)); do
        kill -0 "$ranks" 2> /dev/null || break
        sleep 1
    done
    kill -TERM "$ranks" 2> /dev/null || true
    wait "$ranks" || true
    scontrol requeue "${SLURM_ARRAY_JOB_ID}_${SLURM_ARRAY_TASK_ID}"
    exit 0
}
trap requeue USR1

# Whole hosts, bound by nobody but the ranks themselves; tasks and CPUs are told again, as srun does not inherit them.
srun --nodes=256 --ntasks=512 --ntasks-per-node=2 \
    --cpus-per-task=48 --exclusive --distribution=block:block \
    --cpu-bind=none --kill-on-bad-exit=1 \
    "${python[@]}" -m affinity.bind --plan "$files/plan.json" -- \
    "${python[@]}" -m cputrain train "$files/recipe.yaml" "${settings[@]}" ${resume[@]+"${resume[@]}"} &
ranks=$!
wait "$ranks"

