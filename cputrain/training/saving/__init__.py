"""Saving and resuming: position.py is where a training stands, snapshot.py copies a rank's state and puts it back,
writer.py writes it in the background, saver.py decides what is written when, restore.py finds the newest good one."""
