"""Bind processes as planned, read the binding back from the kernel, and find bound processes.

Only bind_process, bind_thread, exec_bound, set_memory_policy and running_on change the process.
"""
