"""Many hosts: which hosts a job has, how a launcher starts its ranks there, how they are watched and ended.

`hosts` reads and writes lists of hosts, `launchers` has one record for each launcher, `supervise` starts ranks and
watches them, `preflight` checks the hosts before a job, `usage` records what ranks and hosts use, `fabric` has the
settings of each kind of network. Nothing here imports torch.
"""
