"""A run's folder as an HTML page and as a live terminal screen: curves, resource use of workers and hosts."""
