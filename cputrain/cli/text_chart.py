"""A curve drawn with text, for a terminal."""

from collections.abc import Callable, Sequence

WIDTH, HEIGHT = 64, 10
LEVELS = " ▁▂▃▄▅▆▇█"


def sampled(value_at: Callable[[int], float], count: int) -> list[float]:
    """Values at WIDTH evenly spaced places from 0 to `count` - 1."""
    return [value_at(round(i * (count - 1) / (WIDTH - 1))) for i in range(WIDTH)]


def curve(values: Sequence[float], last: str) -> str:
    """One bar for each value, from 0 to the largest; `last` labels the end of the horizontal axis."""
    most = max(values)
    eighths = [round(8 * HEIGHT * value / most) if most > 0 else 0 for value in values]
    lines = []
    for row in reversed(range(HEIGHT)):
        label = f"{most:.4g}" if row == HEIGHT - 1 else "0" if row == 0 else ""
        lines.append(f"  {label:>8} │" + "".join(LEVELS[min(max(each - 8 * row, 0), 8)] for each in eighths).rstrip())
    lines.append(f"  {'':>8} └{'─' * len(values)}")
    lines.append(f"  {'':>8}  0{last:>{len(values) - 1}}")
    return "\n".join(lines)
