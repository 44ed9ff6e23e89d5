"""One rounding step of each dtype, the most by which two right results may differ.

Needs torch alone: tests/gpu uses it too. A test that allows more says how many steps.
"""

from __future__ import annotations

import torch

NARROW = {torch.float16: 2.0**-10, torch.bfloat16: 2.0**-7}


def rounding_steps(*, fp32: float) -> dict[torch.dtype, float]:
    """Relative steps of the dtypes that the op takes, from the widest on.

    fp32: the test's own; the order of its sums decides there, not the last bit.
    """
    float8 = {torch.float8_e4m3fn: 2.0**-3, torch.float8_e5m2: 2.0**-2}
    return {torch.float32: fp32, **NARROW, **float8}
