"""A run's folder: its files and their names (`folder`), the event log (`events`), and which settings a resumed run may
change (`resume`). Nothing here trains."""
