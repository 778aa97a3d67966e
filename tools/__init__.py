"""Programs for those who work on cputrain; none of them is installed."""
