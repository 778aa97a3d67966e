"""Networks: networks.py makes a recipe's network, weights.py loads weights into it. fusion.py makes its layers
native for training (batchnorm_relu.py, by the kernels in native/) and makes a faster network for evaluation. sizes.py
knows parameters, activations and FLOP without torch.
"""

from cputrain.affinity.lazy import front

__getattr__, __dir__ = front(__name__, __file__)
