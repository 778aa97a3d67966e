"""The options of `cputrain prepare`, which a prepared folder's manifest records."""

from dataclasses import dataclass

SHARD_BYTES = 256 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """How a data set is packed.

    `quality` is that of JPEGs written anew; None keeps the files as they are (but TFRecords get only gray and RGB
    JPEGs).
    """

    kind: str
    source: str
    seed: int = 1
    shard_bytes: int = SHARD_BYTES
    shards: int | None = None
    val_fraction: float | None = None
    test_fraction: float | None = None
    label_column: str | None = None
    short_side: int | None = None
    quality: int | None = None
    format: str = "tar"
