#!/bin/bash
#SBATCH --job-name=resnet50
#SBATCH --nodes=256
#SBATCH --exclusive
#SBATCH --mem=0
#SBATCH --time=02:00:00
#SBATCH --signal=B:USR1@120
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=resnet50-%j.out
set -euo pipefail

output=runs/resnet50
settings=()
settings+=("output=$output")
files="$output.job"
mkdir -p -- "$files"
files="$(cd -- "$files" && pwd)"
cat > "$files/recipe.yaml" <<'END_OF_RECIPE'
name: resnet50
END_OF_RECIPE

# What an earlier job has done is gone on from; of what is finished, --resume only says so.
resume=()
if [ -e "$output/events.jsonl" ]; then
    resume=(--resume)
fi
export TQDM_MININTERVAL=30  # nobody watches the bar: a line now and then

unset SLURM_EXPORT_ENV  # where sbatch was given --export, srun would keep from the ranks what is set here
scontrol show hostnames > "$files/nodes"
# Workers per host, their cores and threads, and the network's settings are planned on the job's first host: this one.
# Every rank checks that its own host gave it just this.
python -m cputrain plan "$files/recipe.yaml" "${settings[@]}" \
    --nodes 256 --fabric auto --format json > "$files/plan.json"
launch=()
python -m mpi.first_host "$files" --launcher srun --fabric auto \
    --port "$((29500 + SLURM_JOB_ID % 1000))" \
    > "$files/first-host.sh"
# shellcheck disable=SC1091  # written by the lines before
. "$files/first-host.sh"

# The time is nearly up: what runs saves its state and ends; this job is queued again and goes on from there.
requeue() {
    echo "time limit: requeued, to go on from the last checkpoint"
    kill -USR1 "$running" 2> /dev/null || true
    for ((i = 0; i < 90; i++)); do
        kill -0 "$running" 2> /dev/null || break
        sleep 1
    done
    kill -TERM "$running" 2> /dev/null || true
    wait "$running" || true
    scontrol requeue "$SLURM_JOB_ID"
    exit 0
}
trap requeue USR1

"${launch[@]}" python -m affinity.bind --plan "$files/plan.json" -- \
    python -m cputrain train "$files/recipe.yaml" "${settings[@]}" ${resume[@]+"${resume[@]}"} &
running=$!
wait "$running"

