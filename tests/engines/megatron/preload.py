"""Imported once by the process from which all ranks are forked: importing Megatron takes seconds."""

from __future__ import annotations

import logging

import torch

from . import shim

torch.set_num_threads(1)
shim.install()
logging.disable(logging.WARNING)


shim.finish()
