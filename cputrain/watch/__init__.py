"""A run as it goes on, on a terminal: its event log read as it grows (`tail`), what is known of it (`state`), and how
that looks (`screen`)."""
