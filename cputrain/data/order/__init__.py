"""The order in which images are used: pure functions of seed, epoch and step, the same for any number of workers.

Permutations of an epoch, the share of each rank, the order that allows large reads, and a measure of mixing.
"""
