"""Code that runs first in every Python of this environment, even isolated ones: a .pth file in its site-packages."""

import os
import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

FAULTS = Path(__file__).parents[1] / "faults/injected/faults.py"


@contextmanager
def injected_faults() -> Iterator[None]:
    """Inject FAULTS into programs that start inside the block with FAULT_RANK in their environment."""
    # Python reads the file once for each name of the folder, such as lib and lib64.
    line = "import os, sys; 'FAULT_RANK' in os.environ and not hasattr(sys, 'faults') and "
    line += f"(setattr(sys, 'faults', True), exec(open({str(FAULTS)!r}).read(), {{'__name__': 'faults'}}))\n"
    file = Path(sysconfig.get_path("purelib"), f"injected-faults-{os.getpid()}.pth")
    file.write_text(line, encoding="utf-8")
    try:
        yield
    finally:
        file.unlink()
