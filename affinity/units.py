"""Units of memory, in bytes."""

GIB = 1 << 30
