"""A process's rank, from any launcher's environment; and the address and port at which the ranks of a job meet."""
