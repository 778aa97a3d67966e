"""Networks: networks.py builds a recipe's network, weights.py loads weights into it. fusion.py replaces its layers by
native ones for training (batchnorm_relu.py and convolution.py, with the kernels in native/) if they compute the same
(evidence.py), and folding.py builds a faster network for evaluation. sizes.py returns parameters, activations and FLOP
without importing torch.
"""

from cputrain.affinity.lazy import front

__getattr__, __dir__ = front(__name__, __file__)
