"""Machine + Request -> Plan: each worker's CPUs, memory, threads and environment, with a reason for every value.

Stages in order: usable_cores, domains (with worker_count), worker_sizes (by rules), core_roles, memory, openmp and
oneccl. All are pure; only runtime reads the file system, to find the OpenMP runtime that a Python loads.
"""
