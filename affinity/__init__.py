"""One machine: read its topology, decide who runs where and why, bind a process and read back what the kernel gave."""
