"""`python -m cputrain`, and the console script once it has found this package."""

import sys

# Neither this module nor the packages above it import more than Python itself has imported: in a folder on PYTHONPATH
# may be any module's name.
from cputrain.affinity.start import isolate

isolate()

from cputrain.cli import main as main

if __name__ == "__main__":
    sys.exit(main())
