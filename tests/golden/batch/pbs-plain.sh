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

unset OMP_NUM_THREADS  # PBS sets it, on the first host only
cp -- "$PBS_NODEFILE" "$files/nodes"
# Workers per host, their cores and threads, and the network settings are planned here, on the job's first host.
# Every rank checks that its host's kernel gave it what is planned.
python -I "$start" cputrain plan "$files/recipe.yaml" "${settings[@]}" \
    --nodes 256 --fabric auto --format json > "$files/plan.json"
launch=()
python -I "$start" cputrain.mpi.first_host "$files" --launcher srun --fabric auto \
    --port "$((29500 + ${PBS_JOBID%%[!0-9]*} % 1000))" \
    > "$files/first-host.sh"
# shellcheck disable=SC1091  # written above
. "$files/first-host.sh"

"${launch[@]}" python -I "$start" cputrain.affinity.bind --plan "$files/plan.json" -- \
    python -I "$start" cputrain train "$files/recipe.yaml" "${settings[@]}" ${resume[@]+"${resume[@]}"} &
running=$!
# At the time limit PBS sends SIGTERM, and SIGKILL after its kill_delay. The ranks save their state and end; the next
# job of the chain continues from there.
trap 'kill -USR1 "$running" 2> /dev/null || true; wait "$running" || true; exit 143' TERM
wait "$running"

