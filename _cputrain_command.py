"""The console script `cputrain`. It lies beside the packages: a folder on PYTHONPATH may have one of the name cputrain.

Like cputrain/__main__.py, which goes on from here, it imports nothing that Python itself has not imported.
"""

import os
import sys


def main() -> int:
    """Run a command: see cputrain.cli.main."""
    sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
    import cputrain  # noqa: F401  it is found here, and imports nothing

    del sys.path[0]
    from cputrain.__main__ import main

    return main()
