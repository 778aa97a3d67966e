"""Watchers of a training, a file each: what goes on beside the steps.

base.py has their base class, order.py the list in which they are called. To add a watcher, add a file here and a line
in the list.
"""
