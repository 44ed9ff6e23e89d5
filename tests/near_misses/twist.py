"""The plainest spelling of the exchange with one thing changed.

Axes: N ranks, B tokens, H heads, h = H/N, D head dim. Twists see ``[N, B, h, D]`` and
``[N, B, h]``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from corpus import PACKS, WIRES, finite_max
from torch import Tensor

from near_misses.shows import Pair, Partials, ordinary


def _same(o: Tensor, lse: Tensor) -> Pair:
    return o, lse


@dataclass(frozen=True)
class Twist:
    """Changes to one plain spelling, base e, each at one place.

    sent, received: payload and LSE before and after the exchange. top: the max of the
    LSEs. power: from an LSE less top to a weight. weight: from the unnormalised weights
    and the LSE. total: the denominator. out: the merged fp32 result, with what was
    received. late: the result in its dtype.
    """

    sent: Callable[[Tensor, Tensor], Pair] = _same
    received: Callable[[Tensor, Tensor], Pair] = _same
    power: Callable[[Tensor], Tensor] = torch.exp
    weight: Callable[[Tensor, Tensor], Tensor] = lambda weight, lse: weight
    top: Callable[[Tensor], Tensor] = lambda lse: lse.amax(0, keepdim=True)
    total: Callable[[Tensor, Tensor], Tensor] = lambda total, lse: total
    out: Callable[[Tensor, Tensor, Tensor], Tensor] = lambda out, o, lse: out
    late: Callable[[Tensor], Tensor] = lambda out: out


@dataclass(frozen=True)
class NearMiss:
    """A function that must not fuse.

    reason: a part of the refusal. shows: partials on which it isn't the merge.
    """

    name: str
    reason: str
    twist: Twist = Twist()
    shows: Partials = ordinary
    num_ranks: int = 2
    num_tokens: int = 6
    num_heads: int = 8
    head_dim: int = 16
    dtype: torch.dtype = torch.float32

    def __str__(self) -> str:
        return self.name

    def function(self, groups: dict[str, Any]) -> Callable[..., Any]:
        return twisted(self, groups[str(self.num_ranks)])


def twisted(case: NearMiss, group: Any) -> Callable[..., Any]:
    """The plain exchange of [B, H, D] and [B, H] with the twist of ``case``."""
    twist, n = case.twist, case.num_ranks

    def fn(o: Tensor, lse: Tensor) -> Any:
        b, heads, d = o.shape
        send_o = o.view(b, n, heads // n, d).transpose(0, 1)
        send_lse = lse.view(b, n, heads // n).transpose(0, 1)
        sent = twist.sent(send_o, send_lse)
        got_o, got_lse = PACKS["two"](*sent, WIRES["functional"], group)
        got_o, got_lse = twist.received(got_o.float(), got_lse)
        weight = twist.power(got_lse - twist.top(got_lse))
        weight = twist.weight(weight, got_lse)
        total = twist.total(weight.sum(0), got_lse)
        merged = (weight.unsqueeze(-1) * got_o).sum(0) / total.unsqueeze(-1)
        return twist.late(twist.out(merged, got_o, got_lse).to(o.dtype))

    return fn


def one_slice(x: Tensor, change: Callable[[Tensor], Tensor], index: int = 0) -> Tensor:
    """``x`` with one slice of its first axis changed."""
    parts = [*x.unbind(0)]
    parts[index] = change(parts[index])
    return torch.stack(parts)


def on_lse(change: Callable[[Tensor], Tensor]) -> Twist:
    """A change of every received LSE."""
    return Twist(received=lambda o, lse: (o, change(lse)))


def on_payload(change: Callable[[Tensor], Tensor]) -> Twist:
    return Twist(received=lambda o, lse: (change(o), lse))


def on_weights(change: Callable[[Tensor], Tensor]) -> Twist:
    return Twist(weight=lambda weight, lse: change(weight))


def lse_of_row(token: int, head: int, change: Callable[[Tensor], Tensor]) -> Twist:
    """A change of the LSEs [N, B, h] of one row."""

    def received(o: Tensor, lse: Tensor) -> Pair:
        where = torch.arange(lse.shape[1]) == token
        where = where.unsqueeze(-1) & (torch.arange(lse.shape[2]) == head)
        return o, torch.where(where, change(lse), lse)

    return Twist(received=received)


def guarded(lse: Callable[[Tensor, Tensor], Tensor]) -> Twist:
    """LSEs from what was received; rows whose LSEs are all empty merge to 0."""
    return Twist(
        received=lambda o, received: (o, lse(o, received)),
        top=lambda lse: finite_max(lse.amax(0, keepdim=True)),
        total=lambda total, lse: total.clamp(min=1.0),
    )
