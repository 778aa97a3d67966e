"""From a recipe or planning options to bound worker processes: the planner's request, the hosts and their plans, the
job that a launcher starts, and what each rank does before it trains. Batch scripts are in `cputrain.jobs`."""
