"""Entry point of `python -m cputrain`, and of the console script once it has found this package."""

import sys

# Up to isolate(), import only modules that Python itself has imported: a folder on PYTHONPATH may shadow any other.
from cputrain.affinity.start import isolate

isolate()

from cputrain.cli import main as main

if __name__ == "__main__":
    sys.exit(main())
