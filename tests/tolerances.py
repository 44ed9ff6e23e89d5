"""One rounding step of each dtype, the most by which two right results may differ.

Needs torch and merge.py alone: tests/gpu uses it too. A test that allows more says how
many steps.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dcp_inductor.merge import LseMode, a2a_lse_reduce_reference

NARROW = {torch.float16: 2.0**-10, torch.bfloat16: 2.0**-7}


def rounding_steps(*, fp32: float) -> dict[torch.dtype, float]:
    """Relative steps of the dtypes that the op takes, from the widest on.

    fp32: the test's own; the order of its sums decides there, not the last bit.
    """
    float8 = {torch.float8_e4m3fn: 2.0**-3, torch.float8_e5m2: 2.0**-2}
    return {torch.float32: fp32, **NARROW, **float8}


def assert_merged(
    out: Tensor, o: Tensor, lse: Tensor, rank: int, mode: LseMode = "base2"
) -> None:
    """``out`` is a rank's merge, within a step of what went into each element.

    o: all ranks' partials ``[N, B, H, D]``; lse: ``[N, B, H]``.
    """
    wanted, _ = a2a_lse_reduce_reference(o, lse, rank=rank, lse_mode=mode)
    scale, _ = a2a_lse_reduce_reference(o.float().abs(), lse, rank=rank, lse_mode=mode)
    off = (out.float() - wanted.float()).abs() / scale.clamp(min=1e-3)
    assert out.shape == wanted.shape
    assert out.dtype == o.dtype
    assert not out.isnan().any()
    assert off.max().item() <= rounding_steps(fp32=1e-5)[o.dtype], off.max().item()
