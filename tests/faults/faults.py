"""All faults, in the order of the table."""

from tests.faults.causes import checkpoints, disks, inputs, kills, network, silent, stops, strangers
from tests.faults.fault import Fault

FAULTS: tuple[Fault, ...] = (
    *kills.FAULTS,
    *stops.FAULTS,
    *checkpoints.FAULTS,
    *disks.FAULTS,
    *silent.FAULTS,
    *network.FAULTS,
    *strangers.FAULTS,
    *inputs.FAULTS,
)
