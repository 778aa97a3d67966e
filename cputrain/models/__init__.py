"""Networks: torchvision's classifiers, a few that it lacks, and variants of batch-norm and initialization.

build.py makes a recipe's network; batchnorm.py, freeze.py and weights.py change it. sizes.py knows parameters, FLOPs
and memory without torch, for plans.
"""
