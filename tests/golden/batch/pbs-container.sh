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
cat > "$files/container.sh" <<'END_OF_CONTAINER'
#!/bin/bash
# Starts the container on this host, once for each rank, with the command in the arguments.
set -euo pipefail

runtime=apptainer

# Files and folders have the same paths inside; values are quoted as in CSV.
declare -A mounted=()
mounts=()
mount_path() {
    local path
    path="$(realpath --canonicalize-missing --no-symlinks -- "$1")"
    if [ ! -e "$path" ] || [ -n "${mounted["$path"]:-}" ]; then return; fi
    mounted["$path"]=yes
    path="${path//\"/\"\"}"
    mounts+=(--mount "type=bind,\"source=$path\",\"destination=$path\"")
}
CPUTRAIN_CACHE="${CPUTRAIN_CACHE:-${XDG_CACHE_HOME:-${HOME:-/tmp}/.cache}/cputrain}"
export CPUTRAIN_CACHE
mkdir -p -- "$CPUTRAIN_CACHE" 2> /dev/null || true  # without permission the trainer works without a cache
mount_path "$PWD"
mount_path "$CPUTRAIN_CACHE"
mount_path "$(dirname -- runs/resnet50)"
mount_path /data/imagenet

# Keep the host's Python packages out of the image.
unset PYTHONHOME PYTHONPATH
export PYTHONNOUSERSITE=1

exec "$runtime" exec "${mounts[@]}" --pwd "$PWD" --nv '--bind=/a b' 'image'"'"'s.sif' "$@"
END_OF_CONTAINER

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
bash "$files/container.sh" python -I -m cputrain plan "$files/recipe.yaml" "${settings[@]}" \
    --nodes 256 --fabric auto --format json > "$files/plan.json"
launch=()
bash "$files/container.sh" python -I -m cputrain.mpi.first_host "$files" --launcher srun --fabric auto \
    --port "$((29500 + ${PBS_JOBID%%[!0-9]*} % 1000))" \
    > "$files/first-host.sh"
# shellcheck disable=SC1091  # written above
. "$files/first-host.sh"

"${launch[@]}" bash "$files/container.sh" python -I -m cputrain.affinity.bind --plan "$files/plan.json" -- \
    python -I -m cputrain train "$files/recipe.yaml" "${settings[@]}" ${resume[@]+"${resume[@]}"} &
running=$!
# At the time limit PBS sends SIGTERM, and SIGKILL after its kill_delay. The ranks save their state and end; the next
# job of the chain continues from there.
trap 'kill -USR1 "$running" 2> /dev/null || true; wait "$running" || true; exit 143' TERM
wait "$running"

