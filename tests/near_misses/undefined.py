"""Merges that differ only where a partial is NaN at positive weight, or an LSE is NaN.

Fused or not, the numbers are right everywhere else.
"""

from __future__ import annotations

import torch

from near_misses.shows import payload_near, some_lses
from near_misses.twist import NearMiss, Twist, on_lse, on_payload

UNDEFINED = [
    NearMiss(
        "NaN LSE as 0",
        "",
        on_lse(
            lambda x: torch.nan_to_num(x, nan=0.0, posinf=torch.inf, neginf=-torch.inf)
        ),
        some_lses(torch.nan),
    ),
    NearMiss(
        "NaN payload read as 0",
        "",
        on_payload(torch.nan_to_num),
        payload_near(torch.nan),
    ),
    NearMiss(
        "NaN result as 0",
        "",
        Twist(out=lambda out, o, lse: torch.nan_to_num(out, nan=0.0)),
        dtype=torch.bfloat16,
    ),
]
