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

# Starts cputrain's modules without importing others from this directory or from PYTHONPATH.
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

# Resume the run of an earlier job. A run that failed before its first step starts over; for a finished run, --resume
# only prints the result.
resume=()
if [ -e "$output/.cputrain-run" ] && [ -e "$output/recipe.yaml" ]; then
    resume=(--resume)
fi
export TQDM_MININTERVAL=30  # seconds between lines of progress in the job's output

unset SLURM_EXPORT_ENV  # after sbatch --export=..., srun would not pass the variables set here to the ranks
scontrol show hostnames > "$files/nodes"
# Workers per host, their cores and threads, and the network settings are planned here, on the job's first host.
# Every rank checks that the kernel bound it as planned.
python -I "$start" cputrain plan "$files/recipe.yaml" "${settings[@]}" \
    --nodes 256 --fabric auto --format json > "$files/plan.json"
launch=()
python -I "$start" cputrain.mpi.first_host "$files" --launcher srun --fabric auto \
    --port "$((29500 + SLURM_JOB_ID % 1000))" \
    > "$files/first-host.sh"
# shellcheck disable=SC1091  # written above
. "$files/first-host.sh"

# Near the time limit the ranks save their state and exit; this job is requeued and resumes from there.
requeue() {
    echo "time limit reached: requeued to resume from the last checkpoint"
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

