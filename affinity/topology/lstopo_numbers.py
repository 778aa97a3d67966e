"""Numbers in lstopo's XML."""


def plain_number(text: str) -> int:
    """A number of digits alone. Raises ValueError at anything else: a sign, a blank, "nan"."""
    if not (text.isascii() and text.isdecimal() and len(text) <= 20):
        raise ValueError(f"{text[:40]!r} is not a number")
    return int(text)
