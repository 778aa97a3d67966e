"""Run folders (`folder`: files, lock, removal, resume) and event logs (`events`: writing, reading, export). No training
happens here.
"""
