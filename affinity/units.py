"""Units of memory, in bytes."""

MIB = 1 << 20
GIB = 1 << 30


def memory_text(size_bytes: int) -> str:
    """An amount of memory in GiB, below 1 GiB in MiB: "96 GiB", "384 MiB"."""
    return f"{size_bytes / GIB:.0f} GiB" if size_bytes >= GIB else f"{size_bytes / MIB:.0f} MiB"
