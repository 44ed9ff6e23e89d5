"""What a Structure is, and the exchange of two tensors that most are built on.

Axes: N ranks, B tokens, H heads, h = H/N, D head dim.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from corpus import MERGES, POWERS, WIRES
from torch import Tensor

from near_misses.shows import Pair

send = WIRES["functional"]


@dataclass(frozen=True)
class Structure:
    """A function whose surroundings make a fusion wrong, or that is no exchange.

    make: from harness.fake_world()'s groups to the function; args: one rank's
    arguments. edit: changes the graph before the pass. dynamic: the arguments whose
    first axis is symbolic. batch: its size when traced.
    """

    name: str
    reason: str
    make: Callable[[dict[str, Any]], Callable[..., Any]]
    args: Callable[[torch.Generator, int], tuple[Tensor, ...]]
    edit: Callable[[torch.fx.Graph], None] | None = None
    dynamic: tuple[int, ...] = ()
    batch: int = 4
    scalars: bool = False

    def __str__(self) -> str:
        return self.name


def partials(rng: torch.Generator, b: int) -> Pair:
    """One rank's [B, H, D] and [B, H]."""
    return torch.randn(b, 4, 8, generator=rng), torch.randn(b, 4, generator=rng)


def split(x: Tensor, n: int) -> Tensor:
    """[B, H, ..] to [N, B, h, ..]."""
    return x.reshape(x.shape[0], n, -1, *x.shape[2:]).transpose(0, 1).contiguous()


def exchanged(groups: dict[str, Any], *partials: Tensor) -> Any:
    """Each [B, H, ..] as received from the group of two: [2, B, h, ..]."""
    return tuple(send(split(x, 2), groups["2"]) for x in partials)


def combine(o: Tensor, lse: Tensor) -> Pair:
    """The merge of received partials, base e, with the merged LSE."""
    return MERGES["max"](o.float(), lse, POWERS["exp"], "none")


def leaking(leak: Callable[[Tensor, Tensor], Any]) -> Callable[..., Any]:
    """An exchange that also returns something of what it received."""

    def make(groups: dict[str, Any]) -> Callable[..., Any]:
        def fn(o: Tensor, lse: Tensor) -> Any:
            got_o, got_lse = exchanged(groups, o, lse)
            return combine(got_o, got_lse)[0], leak(got_o, got_lse)

        return fn

    return make


def plain(groups: dict[str, Any]) -> Callable[..., Any]:
    return leaking(lambda o, lse: None)(groups)
