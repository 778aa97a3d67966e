"""Lists of words in messages."""

from collections.abc import Sequence


def either(words: Sequence[str]) -> str:
    """ "lars", "momentum or lars", "momentum, lars or rmsprop"; ", or" throughout where a word has a comma itself."""
    if any("," in word for word in words):
        return ", or ".join(words)
    return " or ".join(filter(None, (", ".join(words[:-1]), words[-1])))
