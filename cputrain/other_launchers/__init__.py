"""Command lines of other launchers as `cputrain launch`: what each option becomes (`programs`), the words read as
options (`read`), what they request (`wanted`), and the `cputrain launch` that does it (`translation`).
"""

from cputrain.affinity.lazy import front

__getattr__, __dir__ = front(__name__, __file__)
