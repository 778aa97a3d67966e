"""A curve of Braille dots, for a terminal."""

from collections.abc import Sequence

DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))  # of U+2800, by row and column
BLANK = 0x2800


def braille_curve(points: Sequence[tuple[float, float]], width: int, height: int) -> list[str]:
    """Lines of text with the points, which may go back after a restart: each character has 2 x 4 places; the highest
    and the lowest value stand at the left."""
    if not points:
        return []
    low, high = min(y for _, y in points), max(y for _, y in points)
    first, last = min(x for x, _ in points), max(x for x, _ in points)
    labels = [f"{high:.4g}", *("" for _ in range(height - 2)), f"{low:.4g}"]
    margin = max(map(len, labels))
    columns, rows = 2 * max(width - margin - 2, 4), 4 * height
    cells = [[0] * (columns // 2) for _ in range(height)]
    before = None
    for x, y in points:
        column = round((x - first) / (last - first or 1) * (columns - 1))
        row = round((high - y) / (high - low or 1) * (rows - 1))
        for each in _between(before, (column, row)):
            cells[each[1] // 4][each[0] // 2] |= DOTS[each[1] % 4][each[0] % 2]
        before = column, row
    return [
        f"{label:>{margin}} │{''.join(chr(BLANK + dots) for dots in line)}"
        for label, line in zip(labels, cells, strict=True)
    ]


def _between(before: tuple[int, int] | None, place: tuple[int, int]) -> list[tuple[int, int]]:
    """The places of a straight line from one point to the next, without its begin."""
    if before is None:
        return [place]
    (a, b), (c, d) = before, place
    count = max(abs(c - a), abs(d - b), 1)
    return [(round(a + (c - a) * i / count), round(b + (d - b) * i / count)) for i in range(1, count + 1)]
