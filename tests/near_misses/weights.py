"""The right LSEs in another formula: base, max, gaps, denominator or axis."""

from __future__ import annotations

import torch
from torch import Tensor

from near_misses.reasons import ALL_WEIGHT, NOT_A_MERGE, NOT_IN_EITHER_BASE
from near_misses.shows import Pair, apart, lse_near, ordinary
from near_misses.twist import NearMiss, Twist, on_lse, on_weights


def _one_large(rng: torch.Generator, *shape: int) -> Pair:
    """One row is so far above the others that their weights are denormal."""
    o, lse = ordinary(rng, *shape)
    lse -= 100.0
    lse[0, 0, 0] = 0.0
    return o, lse


def _small_gaps_ignored(lse: Tensor) -> Tensor:
    top = lse.amax(0, keepdim=True)
    return torch.where(top - lse < 0.05, top, lse)


WEIGHTS = [
    NearMiss("mean of payload", "carries 1 tensor", on_weights(torch.ones_like)),
    NearMiss("LSE as weight", ALL_WEIGHT, Twist(weight=lambda w, lse: lse.abs() + 1)),
    NearMiss(
        "no division", NOT_A_MERGE, Twist(total=lambda t, lse: torch.ones_like(t))
    ),
    NearMiss(
        "wrong base below",
        NOT_A_MERGE,
        Twist(total=lambda t, lse: torch.exp2(lse - lse.amax(0)).sum(0)),
    ),
    NearMiss(
        "wrong base above",
        NOT_A_MERGE,
        Twist(
            weight=lambda w, lse: torch.exp2(lse - lse.amax(0)),
            total=lambda t, lse: torch.exp(lse - lse.amax(0)).sum(0),
        ),
    ),
    NearMiss("base 10", NOT_IN_EITHER_BASE, Twist(power=lambda x: torch.pow(10.0, x))),
    NearMiss(
        "gap clamped at 30",
        NOT_A_MERGE,
        Twist(power=lambda x: torch.exp(x.clamp(min=-30.0))),
        apart(40.0),
    ),
    NearMiss(
        "gap clamped at 80",
        NOT_A_MERGE,
        Twist(power=lambda x: torch.exp(x.clamp(min=-80.0))),
        apart(85.0),
    ),
    NearMiss(
        "weights below 1e-6 dropped",
        NOT_A_MERGE,
        on_weights(lambda w: torch.where(w < 1e-6, 0.0, w)),
        apart(20.0),
    ),
    NearMiss(
        "weights below 1e-12 dropped",
        NOT_A_MERGE,
        on_weights(lambda w: torch.where(w < 1e-12, 0.0, w)),
        apart(40.0),
    ),
    NearMiss("epsilon of 1e-2", ALL_WEIGHT, Twist(total=lambda t, lse: t + 1e-2)),
    NearMiss("epsilon of 1e-4", ALL_WEIGHT, Twist(total=lambda t, lse: t + 1e-4)),
    NearMiss(
        "epsilon of 1e-6 without max",
        NOT_A_MERGE,
        Twist(top=lambda lse: torch.zeros_like(lse[:1]), total=lambda t, lse: t + 1e-6),
        lse_near(-14.0, 4.0),
    ),
    NearMiss(
        "total clamped at 1e-6 without max",
        NOT_A_MERGE,
        Twist(
            top=lambda lse: torch.zeros_like(lse[:1]),
            total=lambda t, lse: t.clamp(min=1e-6),
        ),
        lse_near(-14.0, 4.0),
    ),
    NearMiss(
        "base 2 without max",
        "LSEs near -150",
        Twist(power=torch.exp2, top=lambda lse: torch.zeros_like(lse[:1])),
        lse_near(-140.0, 4.0),
    ),
    NearMiss(
        "total clamped at 1.5",
        ALL_WEIGHT,
        Twist(total=lambda t, lse: t.clamp(min=1.5)),
    ),
    NearMiss(
        "total capped at 1.9",
        NOT_A_MERGE,
        Twist(total=lambda t, lse: t.clamp(max=1.9)),
        lse_near(0.0, 0.01),
    ),
    NearMiss(
        "total over the wrong axis",
        NOT_A_MERGE,
        Twist(total=lambda t, lse: torch.exp(lse - lse.amax(0)).sum(0).flip(0)),
    ),
    NearMiss(
        "max of another row", NOT_A_MERGE, Twist(total=lambda t, lse: t.roll(1, 1))
    ),
    NearMiss(
        "sigmoid for more than two ranks",
        NOT_A_MERGE,
        Twist(
            weight=lambda w, lse: torch.sigmoid(lse - lse.flip(0)),
            total=lambda t, lse: torch.full_like(t, lse.shape[0] / 2),
        ),
        num_ranks=4,
    ),
    NearMiss(
        "softmax over pairs of ranks",
        ALL_WEIGHT,
        Twist(
            weight=lambda w, lse: torch.softmax(lse.unflatten(0, (-1, 2)), 1).flatten(
                0, 1
            )
        ),
        num_ranks=4,
    ),
    NearMiss(
        "softmax over heads",
        ALL_WEIGHT,
        Twist(weight=lambda w, lse: torch.softmax(lse, 2)),
    ),
    NearMiss(
        "gaps below 0.05 ignored",
        NOT_A_MERGE,
        on_lse(_small_gaps_ignored),
        lse_near(0.0, 0.02),
    ),
    NearMiss(
        "gaps below 0.01 ignored",
        NOT_A_MERGE,
        Twist(power=lambda x: torch.exp(torch.where(x > -0.01, 0.0, x))),
        lse_near(0.0, 0.01),
    ),
    NearMiss(
        "gaps above 40 cut",
        ALL_WEIGHT,
        Twist(power=lambda x: torch.exp(torch.where(x < -40, 0.0, x))),
        lse_near(0.0, 60.0),
    ),
    NearMiss(
        "gaps of 70 to 200 cut",
        NOT_A_MERGE,
        Twist(power=lambda x: torch.exp(torch.where((x < -70) & (x > -200), 0.0, x))),
        lse_near(0.0, 100.0),
    ),
    NearMiss(
        "gaps of 2 to 7 bent",
        NOT_A_MERGE,
        Twist(power=lambda x: torch.exp(torch.where((x < -2) & (x > -7), x * 1.1, x))),
    ),
    NearMiss(
        "gaps of 9 to 19 bent",
        NOT_A_MERGE,
        Twist(power=lambda x: torch.exp(torch.where((x < -9) & (x > -19), x * 0.5, x))),
        lse_near(0.0, 12.0),
    ),
    NearMiss("global max", NOT_A_MERGE, Twist(top=lambda lse: lse.amax()), _one_large),
    NearMiss(
        "weights of one row only for all",
        NOT_A_MERGE,
        Twist(
            weight=lambda w, lse: w[:, :1].expand(w.shape),
            total=lambda t, lse: t[:1].expand(t.shape),
        ),
    ),
]
