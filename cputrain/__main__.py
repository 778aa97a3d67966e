"""The command `cputrain`, also as `python -m cputrain`."""

import os
import runpy
import sys

# By its path, not as affinity.start: a package of that name in the working folder or on PYTHONPATH would come first.
HOME = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
runpy.run_path(f"{HOME}/affinity/start.py")["isolate"]()

from cputrain.cli import main

if __name__ == "__main__":
    sys.exit(main())
