"""Published results again: the large-batch study trained at this machine's size, and the published tables beside the
sizes that our recipes derive."""
