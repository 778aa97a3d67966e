"""The hosts of a job: hostfiles of every launcher, Slurm's host lists, and the scheduler's allocation.

Hosts that differ form groups of equal hosts, each with its plan (`hostfile.py`).
"""
