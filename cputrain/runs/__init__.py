"""Run folders (`folder`: files, lock, removal) and event logs (`events`: writing, reading, export). No training
happens here.
"""
