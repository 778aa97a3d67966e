"""Native kernels for the layers of any network: `cputrain.optimize`.

plan.py chooses kernels, with reasons; apply.py loads and applies them, in all ranks alike; measure.py keeps measured
speedups. rewriting.py finds batch-norm layers, additions and ReLUs that can be computed together, in forward passes
that tracing.py has proven to be nothing else; fusion.py computes them so, as long as evidence.py finds all as it was.
operators.py registers kernels below torch's operators, for every program; recorder.py and recording.py record these.
batchnorm.py and convolution.py are the layers, with the compiled code in native/, built by build.py; folding.py makes a
network for evaluation, norms.py has batch-norm variants by torch's operators.
"""

from cputrain import lazy_names

__getattr__ = lazy_names(__name__)
