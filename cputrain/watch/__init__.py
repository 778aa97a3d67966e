"""A run as it goes on, on a terminal: its event log read as it grows (`tail`), what is known of it (`state`), and how
that looks (`screen`).
"""

from cputrain.affinity.lazy import front

__getattr__, __dir__ = front(__name__, __file__)
