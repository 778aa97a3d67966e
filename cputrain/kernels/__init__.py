"""Native kernels for layers of any network: batchnorm.py and convolution.py with the compiled code in native/, built by
build.py. fusion.py replaces layers by native ones for training if they compute the same (evidence.py), folding.py
builds a faster network for evaluation; norms.py has batch-norm variants by torch's operators.
"""

from cputrain.affinity.lazy import front

__getattr__, __dir__ = front(__name__, __file__)
