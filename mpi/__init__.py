"""Many processes on many machines: who is which rank, what a job is, how each launcher starts it."""
