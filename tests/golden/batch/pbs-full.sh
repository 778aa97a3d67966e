#!/bin/bash
#PBS -N resnet50
#PBS -S /bin/bash
#PBS -l select=256:ncpus=96:mpiprocs=2
#PBS -l place=scatter:excl
#PBS -l walltime=02:00:00
#PBS -q large
#PBS -A a1
#PBS -M me@example.org
#PBS -m ae
#PBS -J 0-1
#PBS -o logs/x.out
#PBS -e logs/x.err
#PBS -r y
#PBS -l software=x
#PBS --comment='a b'
cd -- "$PBS_O_WORKDIR"
set -eo pipefail

module purge
module load gcc/12
module load python
# shellcheck disable=SC1091  # exists only on the cluster
. '/home/me/my venv/bin/activate'
set -u  # only now: modules and activate may read unset variables

# Runs the trainer's modules, and keeps those of this folder and of PYTHONPATH from it.
start="$(cd / && python -c 'import cputrain; print(cputrain.__path__[0])')/affinity/start.py"
output=runs/resnet50
settings=(plan.threads=20 )
values=(16 32 )
settings+=(batch.local="${values[$PBS_ARRAY_INDEX]}")
output="$output-$PBS_ARRAY_INDEX"
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
# Tasks and CPUs above are those of "skx-8160-2s". The plan itself is made here, on the job's first host.
# Every rank checks that its host's kernel gave it what is planned.
python -I "$start" cputrain plan "$files/recipe.yaml" "${settings[@]}" \
    --nodes 256 --fabric auto --format json > "$files/plan.json"
launch=()
python -I "$start" cputrain.mpi.first_host "$files" --launcher intelmpi --fabric opa \
    --port "$((29500 + ${PBS_JOBID%%[!0-9]*} % 1000))" \
    > "$files/first-host.sh"
# shellcheck disable=SC1091  # written above
. "$files/first-host.sh"

end_of_job() {
    pbsdsh -- rm -rf -- "$stage" || true
}
stage='/scratch/x y'/"${PBS_JOBID%%[!0-9]*}"
trap end_of_job EXIT
data="$(realpath -e -- /data/imagenet)"  # pbsdsh starts in the home folder
# shellcheck disable=SC2016  # expanded by the shell on each host
pbsdsh -- sh -c 'mkdir -p -- "$1" && cp -R -n -- "$2"/. "$1"' stage "$stage" "$data"
settings+=("data.path=$stage")

"${launch[@]}" python -I "$start" cputrain.affinity.bind --plan "$files/plan.json" -- \
    python -I "$start" cputrain train "$files/recipe.yaml" "${settings[@]}" ${resume[@]+"${resume[@]}"} &
running=$!
# At the time limit PBS sends SIGTERM, and SIGKILL after its kill_delay. The ranks save their state and end; the next
# job of the chain continues from there.
trap 'kill -USR1 "$running" 2> /dev/null || true; wait "$running" || true; exit 143' TERM
wait "$running"

