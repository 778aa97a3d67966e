"""Optimizers, and learning-rate schedules as pure functions of the step."""
