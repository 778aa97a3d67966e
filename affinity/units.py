"""Units of memory, in bytes."""

MIB = 1 << 20
GIB = 1 << 30


def memory_text(size_bytes: int) -> str:
    """An amount of memory: "64 GiB", "2.9 GiB" or "231 MiB"."""
    if size_bytes >= 10 * GIB or size_bytes % GIB == 0:
        return f"{size_bytes / GIB:.0f} GiB"
    return f"{size_bytes / GIB:.1f} GiB" if size_bytes >= GIB else f"{size_bytes / MIB:.0f} MiB"
