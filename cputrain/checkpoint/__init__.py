"""The parts of checkpoints: files.py has their format, folder.py their names, state.py copies and loads networks and
optimizers, and writer.py writes in a thread. cputrain/training/saving.py saves trainings with them."""
