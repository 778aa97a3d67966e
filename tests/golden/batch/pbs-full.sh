#!/bin/bash
#PBS -N resnet50
#PBS -l select=256:ncpus=96:mpiprocs=2
#PBS -l place=scatter:excl
#PBS -l walltime=02:00:00
#PBS -q skx
#PBS -A a1
#PBS -J 0-1
#PBS -j oe
#PBS -r y
cd -- "$PBS_O_WORKDIR"
set -euo pipefail

module load gcc/12
module load python
# shellcheck disable=SC1091  # not there where the script is checked
. '/home/me/my venv/bin/activate'

output=runs/resnet50
settings=(plan.threads=20 )
values=(16 32 )
settings+=(batch.local="${values[$PBS_ARRAY_INDEX]}")
output="$output-$PBS_ARRAY_INDEX"
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
MASTER_PORT=$((29500 + ${PBS_JOBID%%[!0-9]*} % 1000))
export MASTER_ADDR MASTER_PORT
export TQDM_MININTERVAL=30  # nobody watches the bar: a line now and then
export FI_PROVIDER=psm2  # Omni-Path's own provider
export HFI_NO_CPUAFFINITY=1  # PSM2 would bind each rank by itself, against the plan
export PSM2_MULTI_EP=1  # MPI and oneCCL each open endpoints of their own
export I_MPI_FABRICS=shm:ofi  # shared memory inside a host, libfabric between hosts
export CCL_ALLREDUCE=rabenseifner  # assumed, not measured: for large gradients bandwidth decides

unset OMP_NUM_THREADS  # PBS sets it, on the first host alone

# Each host stands there once for each of its ranks.
sort -u "$PBS_NODEFILE" | while read -r h; do echo "$h:2"; done > "$files/hosts"
stage='/scratch/x y'/"${PBS_JOBID%%[!0-9]*}"
# shellcheck disable=SC2016  # expanded by the shell on each host
pbsdsh -- sh -c 'mkdir -p -- "$1" && cp -R -n -- "$2"/. "$1"' stage "$stage" /data/imagenet
trap 'pbsdsh -- rm -rf -- "$stage" || true' EXIT
settings+=("data.path=$stage")

mpirun -np 512 -genv I_MPI_PIN 0 -machinefile "$files/hosts" \
    "${python[@]}" -m affinity.bind --plan "$files/plan.json" -- \
    "${python[@]}" -m cputrain train "$files/recipe.yaml" "${settings[@]}" ${resume[@]+"${resume[@]}"} &
ranks=$!
# The time is up: PBS tells first, and kills after its kill_delay. The ranks save their state and end; the next job of
# the chain goes on from there.
trap 'kill -USR1 "$ranks" 2> /dev/null || true; wait "$ranks" || true; exit 143' TERM
wait "$ranks"

