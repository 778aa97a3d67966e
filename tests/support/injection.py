"""Code that runs first in every Python of this environment, isolated or not: a .pth file in its site-packages."""

import os
import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

FAULTS = Path(__file__).parents[1] / "faults/injected/faults.py"


@contextmanager
def injected_faults() -> Iterator[None]:
    """Programs that start inside and have FAULT_RANK in their environment get the faults of FAULTS."""
    # Python reads the file once for each name of the folder, as lib and lib64 are.
    line = "import os, sys; 'FAULT_RANK' in os.environ and not hasattr(sys, 'faults') and "
    line += f"(setattr(sys, 'faults', True), exec(open({str(FAULTS)!r}).read(), {{'__name__': 'faults'}}))\n"
    file = Path(sysconfig.get_path("purelib"), f"injected-faults-{os.getpid()}.pth")
    file.write_text(line, encoding="utf-8")
    try:
        yield
    finally:
        file.unlink()
