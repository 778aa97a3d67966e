"""Text is UTF-8 and names are bytes, whatever encoding the locale has (PEP 383, PEP 540)."""

import locale
import os
import sys
import unicodedata

LOCALE = "cputrain_locale"  # an option -X of Python, which takes any name: the encoding that the locale has


def use_utf8() -> None:
    """Start this program anew in Python's UTF-8 mode where the locale has another encoding: names in recipes, plans and
    messages of other hosts are UTF-8, and could not be opened. For a program's first line; the process stays."""
    if sys.getfilesystemencoding() != "utf-8":
        mode = ("-X", "utf8", "-X", f"{LOCALE}={locale.getpreferredencoding(False)}")
        os.execv(sys.executable, [sys.executable, *mode, *sys.orig_argv[1:]])


def locale_encoding() -> str:
    """The encoding of what programs print here: the locale's."""
    return str(sys._xoptions.get(LOCALE) or locale.getpreferredencoding(False))


def printed_text(data: bytes) -> str:
    """What a program has printed: UTF-8, else in the locale's encoding, a byte that is neither as its code."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return data.decode(locale_encoding(), errors="backslashreplace")


def text_of(name: str) -> str:
    """A file's name as text: UTF-8 whatever the locale, a byte that is none as one surrogate."""
    return os.fsencode(name).decode(errors="surrogateescape")


def one_form(text: str) -> str:
    """A text in one of the Unicode forms that look the same: macOS writes an accent as a character of its own (NFD)."""
    return text if text.isascii() else unicodedata.normalize("NFC", text)
