"""The command `cputrain`, also as `python -m cputrain`."""

import os
import runpy
import sys

# By its path: importing the package would already look for modules in the working folder and on PYTHONPATH.
HERE = os.path.dirname(os.path.abspath(__file__))
runpy.run_path(f"{HERE}/affinity/start.py")["isolate"]()

from cputrain.cli import main

if __name__ == "__main__":
    sys.exit(main())
