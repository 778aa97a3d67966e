"""Inputs for the readers of files, settings and variables, and what is required of every reader.

CPUTRAIN_FUZZ is the number of inputs for each reader; `make fuzz` sets 10,000 and tries new ones each time.
"""

import os
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from cputrain.affinity.errors import InputError

IN_TESTS = 500
COUNT = int(os.environ.get("CPUTRAIN_FUZZ", IN_TESTS))
LIMIT_S = 2.0
fuzzed = settings(
    max_examples=COUNT,
    derandomize=COUNT <= IN_TESTS,  # `make test` tries the same inputs each time, `make fuzz` new ones
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)

VALUES = (
    *("null", "true", "-1", "0", "1e999", ".nan", "9" * 25, "\u0663", "0x", "[]", "{}", '""', "'", "\x00", "*a"),
    *("&a", "!!int 1", "\ud800", "é" * 300, "[" * 300, "{a: " * 300, "\t", ": ", "- ", "? ", "|", ">", "%", "@"),
    *("#", "\n", "\r", "2026-02-30"),
)


def characters(rng: random.Random, most: int) -> str:
    """Up to `most` characters of any kind, mostly ASCII."""
    kinds = (*((0x20, 0x7E),) * 5, (0, 0x7F), (0x80, 0x24F), (0x250, 0xD7FF), (0xE000, 0x10FFFF))
    return "".join(chr(rng.randint(*rng.choice(kinds))) for _ in range(rng.randint(0, most)))


@st.composite
def edited(draw: st.DrawFn, texts: tuple[str, ...]) -> str:
    """One of the texts with some parts replaced, removed, repeated or swapped; or nothing like it."""
    text = draw(st.sampled_from(texts))
    rng = random.Random(draw(st.integers(0, 1 << 32)))  # a draw of each number takes several times as long
    for _ in range(rng.randint(0, 4)):
        begin = rng.choice((0, len(text), *(rng.randint(0, len(text)) for _ in range(4))))
        end = min(len(text), begin + rng.choice((0, 1, rng.randint(0, 12))))
        insert = rng.choice((rng.choice(VALUES), characters(rng, 8), text[begin:end] * 3))
        text = text[:begin] + insert + text[end:]
    return text if rng.randrange(3) else characters(rng, 60)


@st.composite
def damaged(draw: st.DrawFn, data: bytes) -> bytes:
    """The data with some bytes changed, cut or repeated; or nothing like it."""
    rng = random.Random(draw(st.integers(0, 1 << 32)))
    out = bytearray(data)
    for _ in range(rng.randrange(6)):
        place = rng.randrange(len(out) + 1)
        length = rng.choice((1, 1, 4, 100))
        out[place : place + rng.choice((0, length))] = rng.choice(
            (b"", rng.randbytes(length), b"\0" * length, out[place:])
        )
    return bytes(out[:1_000_000]) if rng.randrange(10) else rng.randbytes(rng.randrange(200))


def read(reader: Callable[[], Any]) -> None:
    """Fail where a reader raises anything but InputError in one line, or computes too long."""
    started = time.process_time()
    try:
        reader()
    except InputError as error:
        assert "\n" not in str(error) and len(str(error)) < 2000, error
    assert time.process_time() - started < LIMIT_S


def write(path: Path, text: str) -> Path:
    path.write_bytes(text.encode(errors="surrogatepass"))
    return path
