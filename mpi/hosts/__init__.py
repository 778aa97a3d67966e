"""The hosts of a job: hostfiles of every launcher, Slurm's folded lists, the hosts of a Slurm or PBS job.

Hosts that differ form groups of equal hosts, each with a plan of its own (`groups.py`).
"""
