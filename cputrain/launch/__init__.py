"""From planning options to bound worker processes: the planner's request, the hosts and their plans, the job for a
launcher, and each rank's start before it works. Batch scripts are in `cputrain.jobs`.
"""
