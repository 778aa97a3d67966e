"""Sweeps: expand the grid into trainings, run them one after another, write results, tables and charts.

Also the search for the largest local batch that fits. A repeated sweep continues where the last one stopped.
"""
