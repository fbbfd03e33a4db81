"""The real torchvision, made to be imported beside a torch without CUDA.

PyPI's build of it links CUDA, so its operators are not there, and it gives two of them shapes when it is imported:
declare these, and become the package that comes next on the path.
"""

import importlib.machinery
import os
import sys

import torch

_operators = torch.library.Library("torchvision", "DEF")
for _name in ("nms", "qnms"):
    _operators.define(f"{_name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")

_shim = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_real = importlib.machinery.PathFinder.find_spec(
    __name__, [folder for folder in sys.path if os.path.abspath(folder) != _shim]
)
if _real is None or _real.loader is None or _real.submodule_search_locations is None:
    raise ImportError("torchvision is not installed")
__spec__, __file__, __path__ = _real, _real.origin, list(_real.submodule_search_locations)
_real.loader.exec_module(sys.modules[__name__])
