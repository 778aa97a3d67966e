"""`python -m cputrain` is the command `cputrain`."""

import sys

from cputrain.cli import main

sys.exit(main())
