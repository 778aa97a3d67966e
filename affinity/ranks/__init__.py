"""A process's rank from any launcher's environment, the rendezvous address of a job's ranks, and host names."""
