"""The right formula from other LSEs than came: scaled, rounded, clamped, replaced."""

from __future__ import annotations

import torch
from torch import Tensor

from near_misses.reasons import NOT_A_MERGE, PERMUTED
from near_misses.shows import first_empty, lse_near, ordinary, some_lses
from near_misses.twist import NearMiss, Twist, guarded, lse_of_row, on_lse, one_slice


def _truncated(lse: Tensor, bits: int) -> Tensor:
    """The fp32 LSE without its lowest ``bits`` mantissa bits."""
    return ((lse.view(torch.int32) >> bits) << bits).view(torch.float32)


LSES = [
    NearMiss("temperature 0.99", NOT_A_MERGE, on_lse(lambda lse: lse * 0.99)),
    NearMiss("temperature 1.001", NOT_A_MERGE, on_lse(lambda lse: lse * 1.001)),
    NearMiss("temperature 0.9999", NOT_A_MERGE, on_lse(lambda lse: lse * 0.9999)),
    NearMiss(
        "offset on one source",
        NOT_A_MERGE,
        on_lse(lambda lse: one_slice(lse, lambda x: x + 0.5)),
    ),
    NearMiss(
        "small offset on one source",
        NOT_A_MERGE,
        on_lse(lambda lse: one_slice(lse, lambda x: x + 1e-3, 1)),
    ),
    NearMiss(
        "LSE clamped from below",
        NOT_A_MERGE,
        on_lse(lambda lse: lse.clamp(min=-20)),
        lse_near(-20.0, 6.0),
    ),
    NearMiss(
        "LSE clamped from above",
        NOT_A_MERGE,
        on_lse(lambda lse: lse.clamp(max=80)),
        lse_near(80.0, 6.0),
    ),
    NearMiss(
        "LSE clamped at 5500",
        NOT_A_MERGE,
        on_lse(lambda lse: lse.clamp(max=5500)),
        lse_near(5600.0, 4.0),
    ),
    NearMiss(
        "LSE clamped at 20000",
        NOT_A_MERGE,
        on_lse(lambda lse: lse.clamp(max=2.0e4)),
        lse_near(2.1e4, 4.0),
    ),
    NearMiss(
        "LSE clamped at -20000",
        NOT_A_MERGE,
        on_lse(lambda lse: lse.clamp(min=-2.0e4)),
        lse_near(-2.1e4, 4.0),
    ),
    NearMiss(
        "LSE rounded to bf16", NOT_A_MERGE, on_lse(lambda x: x.bfloat16().float())
    ),
    NearMiss("LSE rounded to fp16", NOT_A_MERGE, on_lse(lambda x: x.half().float())),
    NearMiss(
        "LSE sent as bf16",
        "is torch.bfloat16, not fp32",
        Twist(
            sent=lambda o, lse: (o, lse.bfloat16()),
            received=lambda o, lse: (o, lse.float()),
        ),
    ),
    NearMiss(
        "LSE on a grid of 1/64",
        NOT_A_MERGE,
        on_lse(lambda lse: torch.round(lse * 64) / 64),
    ),
    NearMiss(
        "LSE on a grid of 1/1024",
        NOT_A_MERGE,
        on_lse(lambda lse: torch.round(lse * 1024) / 1024),
    ),
    NearMiss(
        "LSE as fixed point",
        NOT_A_MERGE,
        on_lse(lambda lse: (lse * 256).to(torch.int32).float() / 256),
    ),
    NearMiss(
        "LSE of 20 bits",
        NOT_A_MERGE,
        on_lse(lambda lse: _truncated(lse, 4)),
        lse_near(60.0, 2.0),
    ),
    NearMiss(
        "LSE of 16 bits",
        NOT_A_MERGE,
        on_lse(lambda lse: _truncated(lse, 8)),
        lse_near(60.0, 2.0),
    ),
    NearMiss(
        "LSEs of 200 to 1000 read as 0",
        NOT_A_MERGE,
        on_lse(lambda x: torch.where((x > 200) & (x < 1000), 0.0, x)),
        lse_near(300.0, 4.0),
    ),
    NearMiss(
        "LSEs of 10 to 100 halved",
        NOT_A_MERGE,
        on_lse(lambda x: torch.where((x > 10) & (x < 100), x * 0.5, x)),
        lse_near(30.0, 4.0),
    ),
    NearMiss(
        "LSEs of -100 to -10 halved",
        NOT_A_MERGE,
        on_lse(lambda x: torch.where((x < -10) & (x > -100), x * 0.5, x)),
        lse_near(-30.0, 4.0),
    ),
    NearMiss(
        "LSE of exactly 1 is empty",
        NOT_A_MERGE,
        on_lse(lambda x: torch.where(x == 1.0, -torch.inf, x)),
        some_lses(1.0),
    ),
    NearMiss(
        "LSE of 0 is empty",
        PERMUTED,
        on_lse(lambda x: torch.where(x == 0.0, -torch.inf, x)),
        some_lses(0.0),
    ),
    NearMiss(
        "LSE of -1 is empty",
        NOT_A_MERGE,
        on_lse(lambda x: torch.where(x == -1.0, -torch.inf, x)),
        some_lses(-1.0),
    ),
    NearMiss(
        "LSEs below -1e20 are empty",
        NOT_A_MERGE,
        guarded(lambda o, x: torch.where(x < -1e20, -torch.inf, x)),
        some_lses(-1e30, 0.8),
    ),
    NearMiss(
        "LSEs below -9000 are empty",
        NOT_A_MERGE,
        guarded(lambda o, x: torch.where(x < -9000, -torch.inf, x)),
        some_lses(-1e30, 0.8),
    ),
    NearMiss(
        "empty as -1e30: all empty average",
        NOT_A_MERGE,
        on_lse(lambda x: x.clamp(min=-1e30)),
        some_lses(-torch.inf, 0.8),
    ),
    NearMiss(
        "empty as nan_to_num: all empty average",
        NOT_A_MERGE,
        on_lse(torch.nan_to_num),
        some_lses(-torch.inf, 0.8),
    ),
    NearMiss(
        "+inf LSE as a large one",
        NOT_A_MERGE,
        on_lse(lambda x: x.clamp(max=1e38)),
        some_lses(torch.inf),
    ),
    NearMiss(
        "bent where the batch holds a large LSE",
        NOT_A_MERGE,
        on_lse(lambda x: torch.where((x.amax() > 10) & (x.amax() < 100), x * 0.5, x)),
        lse_near(20.0, 4.0),
    ),
    NearMiss(
        "bent where all LSEs are large",
        NOT_A_MERGE,
        on_lse(lambda x: torch.where(x.amin() > 10, x * 0.5, x)),
        lse_near(20.0, 2.0),
    ),
]

# One row's LSEs alone, wherever the row lies.
ROWS = [
    NearMiss(
        f"row {row} {what}",
        NOT_A_MERGE,
        lse_of_row(row // 4, row % 4, change),
        shows,
        num_tokens=12,
    )
    for row in (0, 1, 5, 12, 13, 40)
    for what, change, shows in (
        ("clamped", lambda x: x.clamp(max=70.0), lse_near(72.0, 4.0)),
        ("of temperature 0.95", lambda x: x * 0.95, ordinary),
        ("empty as -3", lambda x: torch.nan_to_num(x, neginf=-3.0), first_empty),
    )
]
