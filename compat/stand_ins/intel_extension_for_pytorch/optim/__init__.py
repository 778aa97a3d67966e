"""The optimizers that IPEX added: _lars.Lars and _lamb.Lamb."""

from . import _lamb as _lamb
from . import _lars as _lars
