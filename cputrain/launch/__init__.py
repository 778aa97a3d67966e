"""From a recipe or planning options to bound worker processes: the planner's request, the hosts and their plans, the
job for a launcher, and each rank's start before it trains. Batch scripts are in `cputrain.jobs`.
"""
