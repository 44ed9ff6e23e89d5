"""Partials of all ranks on which a near miss shows in the numbers.

Axes: N ranks, B tokens, H heads, D head dim.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

Pair = tuple[Tensor, Tensor]

# (rng, N, B, H, D) -> ([N, B, H, D], [N, B, H])
Partials = Callable[[torch.Generator, int, int, int, int], Pair]


def ordinary(rng: torch.Generator, *shape: int) -> Pair:
    *rows, d = shape
    o = torch.randn(*rows, d, generator=rng)
    return o, torch.randn(*rows, generator=rng) * 2


def lse_near(center: float, spread: float) -> Partials:
    def made(rng: torch.Generator, *shape: int) -> Pair:
        o, lse = ordinary(rng, *shape)
        return o, center + lse * spread / 2

    return made


def payload_near(scale: float, spread: float = 0.25) -> Partials:
    def made(rng: torch.Generator, *shape: int) -> Pair:
        o, lse = ordinary(rng, *shape)
        return scale * (1 + o * spread), lse

    return made


def some_lses(value: float, share: float = 0.3) -> Partials:
    """LSEs of which some are ``value``."""

    def made(rng: torch.Generator, *shape: int) -> Pair:
        o, lse = ordinary(rng, *shape)
        return o, torch.where(torch.rand(lse.shape, generator=rng) < share, value, lse)

    return made


def first_empty(rng: torch.Generator, *shape: int) -> Pair:
    o, lse = ordinary(rng, *shape)
    lse[0] = -torch.inf
    return o, lse


def apart(gap: float) -> Partials:
    """LSEs ``gap`` apart; rank r holds 1 in the columns r mod N and 0 elsewhere."""

    def made(rng: torch.Generator, *shape: int) -> Pair:
        n, b, heads, d = shape
        rank = torch.arange(n).reshape(-1, 1, 1, 1)
        ones = (torch.arange(d) % n == rank).float().expand(shape).clone()
        noise = torch.rand(n, b, heads, generator=rng)
        return ones, rank[..., 0] * -gap + noise * 0.01

    return made
