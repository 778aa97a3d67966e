"""Command lines of other launchers as `cputrain launch`: what each option becomes (launchers.yaml), what a line asks
for (`programs`), and the `cputrain launch` that does it (`translation`).
"""

from cputrain.affinity.lazy import front

__getattr__, __dir__ = front(__name__, __file__)
