"""Settings of the communication between the workers."""

from dataclasses import dataclass
from typing import Annotated, Literal

from annotated_types import Gt

from cputrain.settings import Auto


@dataclass(frozen=True, kw_only=True)
class CommSettings:
    """Communication of gradients between the workers."""

    backend: Literal["auto", "ccl", "gloo", "mpi"] = "auto"
    """Backend of torch.distributed: ccl (oneCCL), gloo, or mpi, which only torch built from source with MPI has. auto:
    ccl if every rank can use it, otherwise gloo."""
    timeout_s: Annotated[float, Gt(0)] = 600.0
    """Seconds that a rank waits for the others in a collective operation before it fails."""
    bucket_mib: Annotated[float, Gt(0)] | Auto = "auto"
    """Size in MiB of the gradient buckets of DDP, each of which is one all-reduce. auto: computed from all-reduce times
    measured at the start of the training."""
    compression: Literal["none", "bf16"] = "none"
    """Number format of the gradients in transit. bf16 halves the traffic: it sends bfloat16 and adds the rounding error
    to the next step's gradients; none sends them as they are."""
    find_unused_parameters: bool = False
    """Search in every pass for parameters that the loss does not depend on, as DDP's option of this name. The search
    starts by itself if the first batch has such parameters: set it to true if only later batches do."""
