"""A run's folder as one HTML page: curves from its events, and the resource use of its workers and hosts."""
