#!/bin/bash
#SBATCH --job-name=train
#SBATCH --nodes=2
#SBATCH --exclusive
#SBATCH --mem=0
#SBATCH --time=02:00:00
#SBATCH --no-requeue
#SBATCH --open-mode=append
#SBATCH --output=train-%j.out
set -euo pipefail

files="train-$SLURM_JOB_ID.job"
mkdir -p -- "$files"
files="$(cd -- "$files" && pwd)"
cat > "$files/container.sh" <<'END_OF_CONTAINER'
#!/bin/bash
# Starts the container on this host, once for each rank, with the command in the arguments.
set -euo pipefail

runtime=docker
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

# Keep the host's Python packages out of the image.
unset PYTHONHOME PYTHONPATH
export PYTHONNOUSERSITE=1

# Pass the rank's identity, its rendezvous and network, and its libraries' settings into the container.
passed=()
while IFS= read -r name; do
    case "$name" in
        TORCHELASTIC_* | OMPI_* | PRTE_* | PMIX_* | MV2_* | PMI_* | MPI_* | I_MPI_* | HYDRA_* | HYDI_* | PALS_* | SLURM_* | PBS_* | \
            RANK | WORLD_SIZE | LOCAL_RANK | LOCAL_WORLD_SIZE | MASTER_* | FI_* | PSM2_* | PSM3_* | HFI_* | UCX_* | CCL_* | \
            GLOO_* | TORCH_* | OMP_* | KMP_* | GOMP_* | MKL_* | MALLOC_* | TQDM_* | CPUTRAIN_* | PYTHONNOUSERSITE | \
            HOME | USER | LOGNAME | http_proxy | https_proxy | no_proxy) passed+=(--env "$name") ;;
    esac
done < <(compgen -e)
# The process manager's socket (PMI) is not reachable inside: oneCCL connects through the job's store and libfabric.
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
        # docker's daemon starts the container outside the job: pass the rank's CPUs and groups explicitly.
        options+=(--ulimit=memlock=-1:-1)
        options+=(--cpuset-cpus "$(awk '$1 == "Cpus_allowed_list:" { print $2 }' /proc/self/status)")
        for group in $(id -G); do options+=(--group-add "$group"); done
        ;;
esac
for device in /dev/infiniband /dev/hfi1* /dev/cxi*; do
    if [ -e "$device" ]; then options+=(--device "$device"); fi
done
exec "$runtime" run "${options[@]}" "${mounts[@]}" "${passed[@]}" \
    image "$@"
END_OF_CONTAINER

unset SLURM_EXPORT_ENV  # after sbatch --export=..., srun would not pass the variables set here to the ranks
scontrol show hostnames > "$files/nodes"
# Workers per host, their cores and threads, and the network settings are planned here, on the job's first host.
launch=()
bash "$files/container.sh" python -I -m cputrain.mpi.first_host "$files" --launcher srun --fabric auto \
    --port "$((29500 + SLURM_JOB_ID % 1000))" \
    --request='{"pin_threads": false, "nodes": 2}' --program=python \
    > "$files/first-host.sh"
# shellcheck disable=SC1091  # written above
. "$files/first-host.sh"

each_host=(srun --nodes=2 --ntasks=2 --ntasks-per-node=1)
end_of_job() {
    "${each_host[@]}" bash "$files/container.sh" --end || true
}
trap end_of_job EXIT

"${launch[@]}" bash "$files/container.sh" python -I -m cputrain.affinity.bind --plan "$files/plan.json" -- \
    python train.py 'it'"'"'s'

