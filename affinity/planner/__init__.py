"""Machine + Request -> Plan: each worker's CPUs, memory, threads and environment, with a reason for every value.

Pure stages in order: `usable_cores`, `with_defaults` (a profile's or a tuned plan's values), `partition_host`,
`worker_sizes`, `assign_roles`, `place_memory`, `worker_environment` and `ccl_environment`. Files are read only by
`find_runtime` (the OpenMP runtime that a Python loads), `read_records` (measurements of this machine), `read_plan`, and
by `plan_this_machine`, which uses the first two.
"""
