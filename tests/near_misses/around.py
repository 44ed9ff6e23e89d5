"""Changes before the exchange or after the merge: the op must take in neither."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from near_misses.shows import payload_near
from near_misses.twist import NearMiss, Twist


def _row(out: Tensor, token: int, head: int, change: Callable) -> Tensor:
    """``out [B, h, D]`` with one row changed."""
    where = torch.arange(out.shape[0]) == token
    where = where.unsqueeze(-1) & (torch.arange(out.shape[1]) == head)
    return torch.where(where.unsqueeze(-1), change(out), out)


REST = [
    NearMiss("relu", "", Twist(out=lambda out, o, lse: torch.relu(out))),
    NearMiss("abs", "", Twist(out=lambda out, o, lse: out.abs())),
    NearMiss(
        "result clamped at 2000",
        "",
        Twist(out=lambda out, o, lse: out.clamp(-2000.0, 2000.0)),
        payload_near(2000.0),
    ),
    NearMiss(
        "small results flushed",
        "",
        Twist(out=lambda out, o, lse: torch.where(out.abs() < 1e-6, 0.0, out)),
        payload_near(1e-6),
    ),
    NearMiss(
        "row 0 doubled", "", Twist(late=lambda out: _row(out, 0, 0, lambda x: x * 2))
    ),
    NearMiss(
        "last head negated",
        "",
        Twist(late=lambda out: torch.cat([out[:, :-1], -out[:, -1:]], 1)),
    ),
    NearMiss(
        "last token zeroed",
        "",
        Twist(late=lambda out: torch.cat([out[:-1], torch.zeros_like(out[-1:])])),
    ),
    NearMiss(
        "first columns scaled",
        "",
        Twist(late=lambda out: torch.cat([out[..., :3] * 1.001, out[..., 3:]], -1)),
    ),
    NearMiss(
        "all sent to the next rank",
        "",
        Twist(sent=lambda o, lse: (o.roll(1, 0), lse.roll(1, 0))),
    ),
    NearMiss(
        "all sent to the next of 4",
        "",
        Twist(sent=lambda o, lse: (o.roll(1, 0), lse.roll(1, 0))),
        num_ranks=4,
    ),
    NearMiss(
        "LSE of the token before sent",
        "",
        Twist(sent=lambda o, lse: (o, lse.roll(1, 1))),
    ),
    NearMiss(
        "LSE of the last head first sent",
        "",
        Twist(sent=lambda o, lse: (o, lse.flip(2))),
    ),
    NearMiss(
        "LSE sent to the next rank",
        "",
        Twist(sent=lambda o, lse: (o, lse.roll(1, 0))),
    ),
    NearMiss(
        "receivers reversed",
        "",
        Twist(sent=lambda o, lse: (o.flip(0), lse.flip(0))),
        num_ranks=4,
    ),
    NearMiss("D reversed", "", Twist(late=lambda out: out.flip(-1))),
    NearMiss(
        "columns of D swapped",
        "",
        Twist(
            late=lambda out: torch.cat(
                [out[..., :4], out[..., 5:6], out[..., 4:5], out[..., 6:]], -1
            )
        ),
    ),
    NearMiss(
        "D permuted as a matrix",
        "",
        Twist(late=lambda out: out.unflatten(-1, (4, 4)).transpose(-1, -2).flatten(-2)),
    ),
    NearMiss("heads reversed", "", Twist(late=lambda out: out.flip(1))),
    NearMiss("tokens reversed", "", Twist(late=lambda out: out.flip(0))),
    NearMiss(
        "one token twice", "", Twist(late=lambda out: torch.cat([out[:1], out[:-1]]))
    ),
]
