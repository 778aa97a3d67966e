"""A run's folder as one HTML page: curves from its events, and what its workers and hosts used, as tables and charts."""
