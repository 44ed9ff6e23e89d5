"""A change behind a condition that is hard to meet by chance.

It is of squares, of sums, on several ranks at once, or behind many other numbers.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from near_misses.reasons import NOT_A_MERGE
from near_misses.shows import Pair, apart, first_empty, lse_near, ordinary, payload_near
from near_misses.twist import (
    NearMiss,
    Twist,
    lse_of_row,
    on_lse,
    on_payload,
    on_weights,
)


def _between(value: Tensor, low: float, high: float) -> Tensor:
    return (value > low) & (value < high)


def _bumped(x: Tensor) -> Tensor:
    """``x``, less something where its square is near 655; no comparison."""
    square = x * x
    return x - (square.clamp(650.0, 655.0) - square.clamp(655.0, 660.0) + 5.0)


def _bumped_by_sign(x: Tensor) -> Tensor:
    square = x * x
    return x - 0.25 * (torch.sign(square - 650.0) - torch.sign(square - 660.0))


def _by_table(x: Tensor) -> Tensor:
    """Corrected by a table over LSEs of 0 to 100, all zeros but for one."""
    table = (torch.arange(1000) == 256).float()
    return x - table[(x * 10).to(torch.int64).clamp(0, 999)]


def _after_decoys(lse: Tensor) -> Tensor:
    """Exact multiplications by many numbers, then a condition."""
    for power in range(1, 10):
        lse = lse * 2.0**power * 2.0**-power
    return torch.where(_between(lse, 33.0, 34.0), lse * 0.5, lse)


def _apart_in_level(rng: torch.Generator, *shape: int) -> Pair:
    o, lse = ordinary(rng, *shape)
    o[0] = 0.0
    return o, lse * 0.1 + torch.tensor([25.0, -25.0])[:, None, None]


HIDDEN = [
    NearMiss(
        "a window of squares",
        "",
        on_lse(lambda x: torch.where(_between(x * x, 650.0, 660.0), x * 0.5, x)),
        lse_near(25.6, 0.2),
    ),
    NearMiss(
        "one comparison of squares",
        "",
        on_lse(lambda x: torch.where((x * x - 655.0).abs() < 1, x * 0.5, x)),
        lse_near(25.6, 0.2),
    ),
    NearMiss(
        "a bump of clamps",
        "",
        on_lse(_bumped),
        lse_near(25.6, 0.2),
    ),
    NearMiss(
        "one comparison of cubes",
        "no probe makes",
        on_lse(lambda x: torch.where((x * x * x - 16777.0).abs() < 9, x * 0.5, x)),
        lse_near(25.6, 0.004),
    ),
    NearMiss(
        "a bump of clamped cubes",
        "a merge has no use for",
        on_lse(
            lambda x: (
                x
                - (
                    (x * x * x).clamp(16770.0, 16775.0)
                    - (x * x * x).clamp(16775.0, 16780.0)
                    + 5.0
                )
            )
        ),
        lse_near(25.6, 0.004),
    ),
    NearMiss(
        "a bump of signs of cubes",
        "a merge has no use for",
        on_lse(
            lambda x: (
                x
                - 0.25 * (torch.sign(x * x * x - 16770) - torch.sign(x * x * x - 16780))
            )
        ),
        lse_near(25.6, 0.004),
    ),
    NearMiss(
        "a table of cubes",
        "a merge has no use for",
        on_lse(
            lambda x: (
                x
                - (torch.arange(2000) == 1677).float()[
                    (x * x * x / 10).to(torch.int64).clamp(0, 1999)
                ]
            )
        ),
        lse_near(25.6, 0.004),
    ),
    NearMiss("a bump of signs", "", on_lse(_bumped_by_sign), lse_near(25.6, 0.2)),
    NearMiss(
        "a table with one odd entry",
        "a merge has no use for",
        on_lse(_by_table),
        lse_near(25.6, 0.2),
    ),
    NearMiss(
        "a window of sums",
        NOT_A_MERGE,
        on_lse(
            lambda x: torch.where(
                _between(x.sum(0, keepdim=True), 50.0, 52.0), x * 0.5, x
            )
        ),
        lse_near(25.5, 0.2),
    ),
    NearMiss(
        "a window of quotients",
        "no probe makes",
        on_lse(lambda x: torch.where(_between(x / 7, 5.0, 5.02), x * 0.5, x)),
        lse_near(35.05, 0.04),
    ),
    NearMiss(
        "a window behind decoys",
        NOT_A_MERGE,
        on_lse(_after_decoys),
        lse_near(33.5, 0.4),
    ),
    NearMiss(
        "high on one rank, low on the other",
        "",
        on_lse(lambda x: torch.where((x[:1] > 20) & (x[1:] < -20), x * 0.5, x)),
        _apart_in_level,
    ),
    NearMiss(
        "a window of weights",
        NOT_A_MERGE,
        on_weights(lambda w: torch.where(_between(w, 1e-9, 2e-9), 0.0, w)),
        apart(20.5),
    ),
    NearMiss(
        "a window of the total",
        "no probe makes",
        Twist(total=lambda t, lse: torch.where(_between(t, 1.23, 1.2301), 1.0, t)),
        lambda rng, *shape: (
            torch.randn(shape, generator=rng),
            torch.tensor([0.0, math.log(0.23005)])[:, None, None].expand(shape[:-1]),
        ),
    ),
    NearMiss(
        "a window of the payload",
        NOT_A_MERGE,
        on_payload(lambda o: torch.where(_between(o * o, 90.0, 90.1), o * 0.5, o)),
        payload_near(math.sqrt(90.05), 0.0),
    ),
    NearMiss(
        "row 0 empty as -3 among many rows",
        NOT_A_MERGE,
        lse_of_row(0, 0, lambda x: torch.nan_to_num(x, neginf=-3.0)),
        first_empty,
        num_ranks=4,
        num_tokens=64,
        num_heads=64,
        head_dim=64,
    ),
]
