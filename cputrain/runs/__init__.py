"""A run's folder: its files and their names (`folder`), the event log (`events`), which settings a resumed run may
change (`resume`), and what a rank knows of its job's earlier attempts (`attempt`). Nothing here trains."""
