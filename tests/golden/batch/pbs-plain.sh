#!/bin/bash
#PBS -N resnet50
#PBS -S /bin/bash
#PBS -l select=256:ncpus=96
#PBS -l place=scatter:excl
#PBS -l walltime=02:00:00
#PBS -j oe
#PBS -r y
cd -- "$PBS_O_WORKDIR"
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

unset OMP_NUM_THREADS  # PBS sets it, on the first host alone
cp -- "$PBS_NODEFILE" "$files/nodes"
# Workers per host, their cores and threads, and the network's settings are planned on the job's first host: this one.
# Every rank checks that its own host gave it just this.
python -m cputrain plan "$files/recipe.yaml" "${settings[@]}" \
    --nodes 256 --fabric auto --format json > "$files/plan.json"
launch=()
python -m mpi.first_host "$files" --launcher srun --fabric auto \
    --port "$((29500 + ${PBS_JOBID%%[!0-9]*} % 1000))" \
    > "$files/first-host.sh"
# shellcheck disable=SC1091  # written by the lines before
. "$files/first-host.sh"

"${launch[@]}" python -m affinity.bind --plan "$files/plan.json" -- \
    python -m cputrain train "$files/recipe.yaml" "${settings[@]}" ${resume[@]+"${resume[@]}"} &
running=$!
# The time is up: PBS tells first, and kills after its kill_delay. What runs saves its state and ends; the next job of
# the chain goes on from there.
trap 'kill -USR1 "$running" 2> /dev/null || true; wait "$running" || true; exit 143' TERM
wait "$running"

