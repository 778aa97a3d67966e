from .screen import MOST_POINTS as MOST_POINTS
from .screen import EventTail as EventTail
from .screen import WatchState as WatchState
from .screen import braille_curve as braille_curve
from .screen import keys_pressed as keys_pressed
