#!/bin/bash
#SBATCH --job-name=prepare
#SBATCH --nodes=1
#SBATCH --exclusive
#SBATCH --mem=0
#SBATCH --time=02:00:00
#SBATCH --signal=B:USR1@120
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=prepare-%j.out
set -euo pipefail

files='my data/shards.job'
mkdir -p -- "$files"
files="$(cd -- "$files" && pwd)"
cat > "$files/container.sh" <<'END_OF_CONTAINER'
#!/bin/bash
# Starts the container on this host, once for each rank, with the command in the arguments.
set -euo pipefail

runtime="$(command -v apptainer || command -v singularity || command -v podman || command -v docker)" || {
    echo "container: no apptainer, singularity, podman or docker on PATH of $(hostname): load its module" >&2
    exit 2
}
label="cputrain.job=${SLURM_JOB_ID:-${PBS_JOBID:-none}}"
if [ "$1" = --end ]; then
    # End this job's containers on this host: a killed client of podman or docker leaves its container running.
    case "${runtime##*/}" in
        podman | docker) "$runtime" ps --quiet --filter "label=$label" | xargs --no-run-if-empty "$runtime" kill ;;
    esac
    exit 0
fi

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
mount_path "$(dirname -- 'my data/shards')"
mount_path raw

# Keep the host's Python packages out of the image.
unset PYTHONHOME PYTHONPATH
export PYTHONNOUSERSITE=1

case "${runtime##*/}" in
    apptainer | singularity)
        exec "$runtime" exec "${mounts[@]}" --pwd "$PWD" docker.io/library/python "$@"
        ;;
esac

# Pass the rank's identity, its rendezvous and network, and its libraries' settings into the container.
passed=()
while IFS= read -r name; do
    case "$name" in
        TORCHELASTIC_* | OMPI_* | PRTE_* | PMIX_* | MV2_* | PMI_* | MPI_* | I_MPI_* | HYDRA_* | HYDI_* | SLURM_* | PALS_* | PBS_* | \
            RANK | WORLD_SIZE | LOCAL_RANK | LOCAL_WORLD_SIZE | MASTER_* | FI_* | PSM2_* | PSM3_* | HFI_* | UCX_* | CCL_* | \
            GLOO_* | TORCH_* | OMP_* | KMP_* | GOMP_* | MKL_* | MALLOC_* | TQDM_* | CPUTRAIN_* | PYTHONNOUSERSITE | \
            HOME | USER | LOGNAME | http_proxy | https_proxy | no_proxy) passed+=(--env "$name") ;;
    esac
done < <(compgen -e)
# The process manager's socket (PMI) is not reachable inside, so oneCCL connects through the job's store and libfabric.
export CCL_ATL_TRANSPORT="${CCL_ATL_TRANSPORT:-ofi}"
passed+=(--env CCL_ATL_TRANSPORT)

# All ranks of a host share its network, shared memory and process IDs. SYS_NICE allows set_mempolicy.
options=(--rm --network=host --ipc=host --pid=host --cap-add=SYS_NICE --security-opt=label=disable
    --entrypoint "" --user "$(id -u):$(id -g)" --workdir "$PWD" --label "$label")
case "${runtime##*/}" in
    podman)
        options+=(--ulimit=host)
        if [ "$(id -u)" != 0 ]; then options+=(--userns=keep-id); fi
        ;;
    *)
        # docker's daemon starts the container outside the job, so pass the rank's CPUs and groups explicitly.
        options+=(--ulimit=memlock=-1:-1)
        options+=(--cpuset-cpus "$(awk '$1 == "Cpus_allowed_list:" { print $2 }' /proc/self/status)")
        for group in $(id -G); do options+=(--group-add "$group"); done
        ;;
esac
for device in /dev/infiniband /dev/hfi1* /dev/cxi*; do
    if [ -e "$device" ]; then options+=(--device "$device"); fi
done
exec "$runtime" run "${options[@]}" "${mounts[@]}" "${passed[@]}" \
    docker.io/library/python "$@"
END_OF_CONTAINER

each_host=(srun --nodes=1 --ntasks=1 --ntasks-per-node=1)
end_of_job() {
    "${each_host[@]}" bash "$files/container.sh" --end || true
}
trap end_of_job EXIT

# Near the time limit the ranks save their state and exit; this job is requeued and resumes from there.
requeue() {
    echo "time limit reached: requeued to resume where it stopped"
    kill -USR1 "$running" 2> /dev/null || true
    for ((i = 0; i < 90; i++)); do
        kill -0 "$running" 2> /dev/null || break
        sleep 1
    done
    kill -TERM "$running" 2> /dev/null || true
    wait "$running" || true
    trap - EXIT
    end_of_job
    scontrol requeue "$SLURM_JOB_ID"
    exit 0
}
trap requeue USR1

bash "$files/container.sh" python -I -m cputrain prepare imagenet raw 'my data/shards' --short-side 256 &
running=$!
wait "$running"

