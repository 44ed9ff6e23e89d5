"""What some versions that the tests run on can't do: torch 2.11 and Triton 3.6."""

from __future__ import annotations

import importlib.util

import pytest
import torch
from torch.torch_version import TorchVersion

from dcp_inductor.compiler import interpreter

SINCE_2_13 = torch.__version__ >= TorchVersion("2.13")


def since_2_13(reason: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(not SINCE_2_13, reason=f"torch before 2.13: {reason}")


def _interprets() -> bool:
    if importlib.util.find_spec("triton") is None:
        return True  # whoever needs it asks for triton first
    return not interpreter._advice()


interprets = pytest.mark.skipif(
    not _interprets(), reason="Triton 3.6's interpreter fails with NumPy 2.4"
)
