"""Development tools of cputrain; none of them is installed."""
