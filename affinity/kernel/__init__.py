"""A plan and the Linux kernel: bind processes as planned, read back what they were given, find bound processes.

Everything here that changes a process says so in its name: bind_process, exec_bound, set_memory_policy, running_on.
"""
