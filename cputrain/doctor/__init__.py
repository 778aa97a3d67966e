"""What a host has and what it lacks: the facts of a bug report, and checks that name a remedy. Works without torch."""
