"""Console script `cputrain`. It lies beside the packages, as a folder on PYTHONPATH may contain a package `cputrain`.

Like cputrain/__main__.py, which continues from here, it imports only modules that Python itself has imported.
"""

import os
import sys


def main() -> int:
    """Run a command: see cputrain.cli.main."""
    sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
    import cputrain  # noqa: F401  found in the inserted path; imports nothing

    del sys.path[0]
    from cputrain.__main__ import main

    return main()
