"""Machine topology: packages, cores, hardware threads (PUs), NUMA nodes, and the parts that a process may use.

Read from this host's /sys and /proc, from a folder or tarball with a copy of them, from lstopo's XML, from a synthetic
description, or from the catalog by name.
"""
