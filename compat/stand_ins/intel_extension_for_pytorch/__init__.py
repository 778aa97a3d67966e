"""Replaces Intel's extension for PyTorch, which ended at PyTorch 2.8: its API for training, over cputrain.

What is not here says so in a line, with what to use instead. docs/guides/moving-in.md has the list.
"""

import torch

from . import cpu as cpu
from . import optim as optim
from . import xpu as xpu
from ._absent import absent
from .frontend import FP32MathMode as FP32MathMode
from .frontend import disable_auto_channels_last as disable_auto_channels_last
from .frontend import enable_auto_channels_last as enable_auto_channels_last
from .frontend import enable_onednn_fusion as enable_onednn_fusion
from .frontend import get_fp32_math_mode as get_fp32_math_mode
from .frontend import optimize as optimize
from .frontend import set_fp32_math_mode as set_fp32_math_mode

# The original works with torch of the same major and minor version only, which programs compare.
__version__ = ".".join((*torch.__version__.split(".")[:2], "0+cpu"))

VERBOSE_OFF, VERBOSE_ON, VERBOSE_ON_CREATION = range(3)
verbose = torch.backends.mkldnn.verbose
"""Prints oneDNN's calls in a `with` block: ipex.verbose(ipex.VERBOSE_ON)."""

__getattr__ = absent(
    __name__,
    {
        "llm": "transformers on PyTorch's own kernels, or vLLM's CPU backend",
        "optimize_transformers": "transformers on PyTorch's own kernels, or vLLM's CPU backend",
        "quantization": "torchao, or Intel's neural-compressor",
        "compile": "torch.compile",
        "fast_bert": "intel_extension_for_pytorch.optimize",
        "nn": "torch.nn",
        "tpp": "torch.nn",
    },
)
