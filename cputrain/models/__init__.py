"""Networks: torchvision's classifiers, a few that it lacks, and variants of batch-norm and initialization.

build.py makes a recipe's network; batchnorm.py, freeze.py and weights.py change it. fusion.py makes its layers native
for training (batchnorm_relu.py, by the kernels in native/), folding.py makes a faster network for evaluation. sizes.py
knows parameters, FLOPs and memory without torch, for plans.
"""
