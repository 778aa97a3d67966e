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

# Runs the trainer's modules, and keeps those of this folder and of PYTHONPATH from it.
start="$(cd / && python -c 'import cputrain; print(cputrain.__path__[0])')/affinity/start.py"
output=runs/resnet50
settings=()
settings+=("output=$output")
files="$output.job"
mkdir -p -- "$files"
files="$(cd -- "$files" && pwd)"
cat > "$files/recipe.yaml" <<'END_OF_RECIPE'
name: resnet50
END_OF_RECIPE

# Continue the run of an earlier job: one that failed before its first step starts anew, of a finished one --resume only
# prints the result.
resume=()
if [ -e "$output/.cputrain-run" ] && [ -e "$output/recipe.yaml" ]; then
    resume=(--resume)
fi
export TQDM_MININTERVAL=30  # seconds between lines of progress in the job's output

unset SLURM_EXPORT_ENV  # after sbatch --export=..., srun would not pass the variables set here to the ranks
scontrol show hostnames > "$files/nodes"
# Workers per host, their cores and threads, and the network settings are planned here, on the job's first host.
# Every rank checks that its host's kernel gave it what is planned.
python -I "$start" cputrain plan "$files/recipe.yaml" "${settings[@]}" \
    --nodes 256 --fabric auto --format json > "$files/plan.json"
launch=()
python -I "$start" cputrain.mpi.first_host "$files" --launcher srun --fabric auto \
    --port "$((29500 + SLURM_JOB_ID % 1000))" \
    > "$files/first-host.sh"
# shellcheck disable=SC1091  # written above
. "$files/first-host.sh"

# Near the time limit: the ranks save their state and end; this job is queued again and continues from there.
requeue() {
    echo "time limit reached: requeued, to continue from the last checkpoint"
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

"${launch[@]}" python -I "$start" cputrain.affinity.bind --plan "$files/plan.json" -- \
    python -I "$start" cputrain train "$files/recipe.yaml" "${settings[@]}" ${resume[@]+"${resume[@]}"} &
running=$!
wait "$running"

