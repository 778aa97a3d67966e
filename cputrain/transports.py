"""oneCCL's transports, MPI and libfabric: how fast each was measured to be between two ranks of this host."""

from collections.abc import Mapping
from contextlib import suppress

from affinity.errors import InputError
from affinity.planner.measured import ALL_REDUCE
from affinity.planner.records import RATE, Record, rate_of, read_records
from affinity.topology.machine import unrestricted
from affinity.topology.sysfs import this_machine
from cputrain.measurements import rate_record

VARIABLE = "CCL_ATL_TRANSPORT"
MPI, LIBFABRIC = "mpi", "ofi"
TITLES = {MPI: "MPI", LIBFABRIC: "libfabric"}
BUCKET_BYTES = 25 << 20  # of DDP's gradient buckets
WHAT = "25 MiB all-reduce"


def rate_name(transport: str) -> str:
    """The name of a transport's kept rate, in bytes/s that each of two ranks sends."""
    return f"{ALL_REDUCE} ccl over {TITLES[transport]}, 25 MiB"


def transport_records(seconds: Mapping[str, tuple[float, float, float]], *, command: str) -> tuple[Record, ...]:
    """The records of all-reduces of BUCKET_BYTES: median, lowest and highest seconds by transport.

    They count for the whole host: a rank reads them that may use only some of its cores.
    """
    host = unrestricted(this_machine())
    rates = {
        name: (BUCKET_BYTES / median, BUCKET_BYTES / highest, BUCKET_BYTES / lowest)
        for name, (median, lowest, highest) in seconds.items()
    }
    return tuple(rate_record(host, rate_name(name), rate, command=command) for name, rate in rates.items())


def kept_seconds(env: Mapping[str, str]) -> dict[str, float]:
    """Seconds of an all-reduce of BUCKET_BYTES by transport, of those that were measured on this host."""
    with suppress(InputError):  # this host's topology cannot be read
        records = read_records(unrestricted(this_machine()), env).of(RATE)
        kept = {record.name: rate_of(record).value for record in records}
        return {name: BUCKET_BYTES / kept[rate_name(name)] for name in TITLES if rate_name(name) in kept}
    return {}


def comparison(seconds: Mapping[str, float]) -> str:
    """What was measured: "25 MiB all-reduce 10.8 ms over MPI, 38.9 ms over libfabric"."""
    return f"{WHAT} " + ", ".join(f"{1000 * each:.1f} ms over {TITLES[name]}" for name, each in seconds.items())
