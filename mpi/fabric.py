"""Fabrics (networks between hosts): settings of libfabric, MPI and oneCCL for each, with reasons."""

from dataclasses import dataclass
from pathlib import Path

Setting = tuple[str, str, str]
"""Environment variable, value, reason."""
ALL_REDUCE = "CCL_ALLREDUCE"  # the variable of oneCCL's algorithm

# CCL_ATL_TRANSPORT is not set here: oneCCL can use MPI only if Intel MPI, MPICH or srun's PMI started the ranks, which
# each rank detects itself.
COMMON_MPI: tuple[Setting, ...] = (
    ("I_MPI_FABRICS", "shm:ofi", "shared memory inside a host, libfabric between hosts"),
)
LARGE_GRADIENTS = "assumed, not measured: bandwidth dominates for large gradients"


@dataclass(frozen=True, slots=True, kw_only=True)
class Fabric:
    """A fabric, the usual link speed of a host in Gbit/s, and the settings for it."""

    name: str
    link_gbit: float
    settings: tuple[Setting, ...]

    @property
    def all_reduce(self) -> str | None:
        """oneCCL's all-reduce that the settings choose; None if they leave it to oneCCL."""
        return next((value for name, value, _ in self.settings if name == ALL_REDUCE), None)


FABRICS = {
    fabric.name: fabric
    for fabric in (
        Fabric(
            name="opa",
            link_gbit=100,
            settings=(
                ("FI_PROVIDER", "psm2", "Omni-Path's libfabric provider"),
                ("HFI_NO_CPUAFFINITY", "1", "prevents PSM2 from changing the plan's core binding"),
                ("PSM2_MULTI_EP", "1", "MPI and oneCCL each open separate endpoints"),
                *COMMON_MPI,
                (ALL_REDUCE, "rabenseifner", LARGE_GRADIENTS),
            ),
        ),
        Fabric(
            name="psm3",
            link_gbit=100,
            settings=(
                ("FI_PROVIDER", "psm3", "Intel Ethernet or InfiniBand through PSM3, as in Intel's MLPerf runs"),
                ("PSM3_ALLOW_ROUTERS", "1", "hosts may be in several subnets"),
                *COMMON_MPI,
            ),
        ),
        Fabric(
            name="ib",
            link_gbit=200,
            settings=(
                ("FI_PROVIDER", "mlx", "UCX over InfiniBand's verbs"),
                ("UCX_TLS", "rc,sm,self", "reliable connections between hosts, shared memory inside"),
                *COMMON_MPI,
                (ALL_REDUCE, "ring", LARGE_GRADIENTS),
            ),
        ),
        Fabric(
            name="ethernet",
            link_gbit=25,
            settings=(
                ("FI_PROVIDER", "tcp", "TCP sockets, which every network card supports"),
                *COMMON_MPI,
                (ALL_REDUCE, "ring", "assumed, not measured: sends the fewest bytes over the slow link"),
            ),
        ),
        Fabric(
            name="efa",
            link_gbit=100,
            settings=(
                ("FI_PROVIDER", "efa", "Amazon's Elastic Fabric Adapter"),
                ("FI_EFA_FORK_SAFE", "1", "scripts fork loader processes"),
                *COMMON_MPI,
            ),
        ),
        Fabric(
            name="slingshot",
            link_gbit=200,
            settings=(
                ("FI_PROVIDER", "cxi", "Slingshot's libfabric provider"),
                ("FI_CXI_DISABLE_HOST_REGISTER", "1", "no accelerator memory is used"),
                *COMMON_MPI,
            ),
        ),
        Fabric(
            name="shm",
            link_gbit=100,
            settings=(("I_MPI_FABRICS", "shm", "one host, so shared memory only"),),
        ),
    )
}


def fabric_between(hosts: int, requested: str, *, elsewhere: str | None = None) -> Fabric:
    """Return the requested fabric between `hosts` hosts; for "auto" the fabric `elsewhere` if given (another machine is
    planned), else this host's."""
    if requested != "auto":
        return FABRICS[requested]
    return FABRICS["shm" if hosts == 1 else elsewhere or fabric_here()]


def fabric_here(root: Path = Path("/")) -> str:
    """Return the fabric of the host under root by its fastest network device; "ethernet" if none is recognized."""
    if any((root / "sys/class/hfi1").glob("hfi1*")):
        return "opa"
    if any((root / "sys/class/cxi").glob("cxi*")):
        return "slingshot"
    for device in sorted((root / "sys/class/infiniband").glob("*")):
        if device.name.startswith("hfi1"):
            return "opa"
        if device.name.startswith("efa") or _vendor(device) == "0x1d0f":
            return "efa"
        if any(_is_infiniband(port) for port in sorted((device / "ports").glob("*"))):
            return "ib"
        if device.name.startswith("irdma"):
            return "psm3"
    return "ethernet"


def _vendor(device: Path) -> str:
    path = device / "device/vendor"
    return path.read_text(encoding="utf-8").strip() if path.is_file() else ""


def _is_infiniband(port: Path) -> bool:
    """Return whether a port's link layer is InfiniBand and its state is active."""
    layer, state = port / "link_layer", port / "state"
    active = not state.is_file() or "ACTIVE" in state.read_text(encoding="utf-8")
    return layer.is_file() and layer.read_text(encoding="utf-8").strip() == "InfiniBand" and active
