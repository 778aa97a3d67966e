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
# Starts the container on this host, once for each rank, and in it the command that follows.
set -euo pipefail

runtime=apptainer

# Files and folders keep their paths inside; the quotes are those of comma-separated values.
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
mkdir -p -- "$CPUTRAIN_CACHE" 2> /dev/null || true  # where it may not be made, the trainer does without
mount_path "$PWD"
mount_path "$CPUTRAIN_CACHE"
mount_path "$(dirname -- runs/resnet50)"
mount_path /data/imagenet

# The host's Python packages are none of the image's.
unset PYTHONHOME PYTHONPATH
export PYTHONNOUSERSITE=1

exec "$runtime" exec "${mounts[@]}" --pwd "$PWD" --nv '--bind=/a b' 'image'"'"'s.sif' "$@"
END_OF_CONTAINER

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
bash "$files/container.sh" python -m cputrain plan "$files/recipe.yaml" "${settings[@]}" \
    --nodes 256 --fabric auto --format json > "$files/plan.json"
launch=()
bash "$files/container.sh" python -m mpi.first_host "$files" --launcher srun --fabric auto \
    --port "$((29500 + ${PBS_JOBID%%[!0-9]*} % 1000))" \
    > "$files/first-host.sh"
# shellcheck disable=SC1091  # written by the lines before
. "$files/first-host.sh"

"${launch[@]}" bash "$files/container.sh" python -m affinity.bind --plan "$files/plan.json" -- \
    python -m cputrain train "$files/recipe.yaml" "${settings[@]}" ${resume[@]+"${resume[@]}"} &
running=$!
# The time is up: PBS tells first, and kills after its kill_delay. What runs saves its state and ends; the next job of
# the chain goes on from there.
trap 'kill -USR1 "$running" 2> /dev/null || true; wait "$running" || true; exit 143' TERM
wait "$running"

