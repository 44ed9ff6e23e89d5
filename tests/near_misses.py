"""Functions that look like DCP's exchange and aren't: each must be left alone.

Most are the plainest spelling with one thing changed, a Twist. ``shows`` makes partials
on which the change shows in the numbers, so that a wrong fusion would be wrong there.

Axes: N ranks, B tokens, H heads, h = H/N, D head dim. Twists see ``[N, B, h, D]`` and
``[N, B, h]``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed._functional_collectives as funcol
from corpus import PACKS, WIRES
from torch import Tensor

Pair = tuple[Tensor, Tensor]


def _same(o: Tensor, lse: Tensor) -> Pair:
    return o, lse


@dataclass(frozen=True)
class Twist:
    """Changes to one plain spelling, base e, each at one place.

    sent, received: payload and LSE before and after the exchange. weight: from the
    unnormalised weights and the LSE. total: the denominator. out: the merged fp32
    result, with what was received. late: the result in its dtype.
    """

    sent: Callable[[Tensor, Tensor], Pair] = _same
    received: Callable[[Tensor, Tensor], Pair] = _same
    power: Callable[[Tensor], Tensor] = torch.exp
    weight: Callable[[Tensor, Tensor], Tensor] = lambda weight, lse: weight
    top: Callable[[Tensor], Tensor] = lambda lse: lse.amax(0, keepdim=True)
    total: Callable[[Tensor, Tensor], Tensor] = lambda total, lse: total
    out: Callable[[Tensor, Tensor, Tensor], Tensor] = lambda out, o, lse: out
    late: Callable[[Tensor], Tensor] = lambda out: out
    wide: bool = True


# (rng, N, B, H, D) -> ([N, B, H, D], [N, B, H])
Partials = Callable[[torch.Generator, int, int, int, int], Pair]


def _ordinary(rng: torch.Generator, *shape: int) -> Pair:
    *rows, d = shape
    o = torch.randn(*rows, d, generator=rng)
    return o, torch.randn(*rows, generator=rng) * 2


def _lse(center: float, spread: float) -> Partials:
    def made(rng: torch.Generator, *shape: int) -> Pair:
        o, lse = _ordinary(rng, *shape)
        return o, center + lse * spread / 2

    return made


def _payload(scale: float, spread: float = 0.25) -> Partials:
    def made(rng: torch.Generator, *shape: int) -> Pair:
        o, lse = _ordinary(rng, *shape)
        return scale * (1 + o * spread), lse

    return made


def _some(value: float, share: float = 0.3) -> Partials:
    """LSEs of which some are ``value``."""

    def made(rng: torch.Generator, *shape: int) -> Pair:
        o, lse = _ordinary(rng, *shape)
        return o, torch.where(torch.rand(lse.shape, generator=rng) < share, value, lse)

    return made


def _one_large(rng: torch.Generator, *shape: int) -> Pair:
    """One row is so far above the others that their weights are denormal."""
    o, lse = _ordinary(rng, *shape)
    lse -= 100.0
    lse[0, 0, 0] = 0.0
    return o, lse


def _first_empty(rng: torch.Generator, *shape: int) -> Pair:
    o, lse = _ordinary(rng, *shape)
    lse[0] = -torch.inf
    return o, lse


def _apart(gap: float) -> Partials:
    """LSEs ``gap`` apart; rank r holds 1 in the columns r mod N and 0 elsewhere."""

    def made(rng: torch.Generator, *shape: int) -> Pair:
        n, b, heads, d = shape
        rank = torch.arange(n).reshape(-1, 1, 1, 1)
        ones = (torch.arange(d) % n == rank).float().expand(shape).clone()
        noise = torch.rand(n, b, heads, generator=rng)
        return ones, rank[..., 0] * -gap + noise * 0.01

    return made


def _zero_rows(rng: torch.Generator, *shape: int) -> Pair:
    o, lse = _ordinary(rng, *shape)
    kept = torch.rand(lse.shape, generator=rng) < 0.7
    return o * kept.unsqueeze(-1), lse


@dataclass(frozen=True)
class NearMiss:
    """A function that must not fuse.

    reason: a part of the refusal. shows: partials on which it isn't the merge. pack:
    a key of corpus.PACKS.
    """

    name: str
    reason: str
    twist: Twist = Twist()
    shows: Partials = _ordinary
    num_ranks: int = 2
    num_tokens: int = 6
    num_heads: int = 8
    head_dim: int = 16
    pack: str = "two"
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
        got_o, got_lse = PACKS[case.pack](*sent, WIRES["functional"], group)
        got_o = got_o.float() if twist.wide else got_o
        got_o, got_lse = twist.received(got_o, got_lse)
        weight = twist.power(got_lse - twist.top(got_lse))
        weight = twist.weight(weight, got_lse)
        total = twist.total(weight.sum(0), got_lse)
        merged = (weight.unsqueeze(-1) * got_o).sum(0) / total.unsqueeze(-1)
        return twist.late(twist.out(merged, got_o, got_lse).to(o.dtype))

    return fn


def _first(x: Tensor, change: Callable[[Tensor], Tensor], index: int = 0) -> Tensor:
    """``x`` with one slice of its first axis changed."""
    parts = [*x.unbind(0)]
    parts[index] = change(parts[index])
    return torch.stack(parts)


def _row(out: Tensor, token: int, head: int, change: Callable) -> Tensor:
    """``out [B, h, D]`` with one row changed."""
    where = torch.arange(out.shape[0]) == token
    where = where.unsqueeze(-1) & (torch.arange(out.shape[1]) == head)
    return torch.where(where.unsqueeze(-1), change(out), out)


def _on_lse(change: Callable[[Tensor], Tensor]) -> Twist:
    """A change of every received LSE."""
    return Twist(received=lambda o, lse: (o, change(lse)))


def _on_payload(change: Callable[[Tensor], Tensor]) -> Twist:
    return Twist(received=lambda o, lse: (change(o), lse))


def _lse_of_row(token: int, head: int, change: Callable[[Tensor], Tensor]) -> Twist:
    """A change of the LSEs [N, B, h] of one row."""

    def received(o: Tensor, lse: Tensor) -> Pair:
        where = torch.arange(lse.shape[1]) == token
        where = where.unsqueeze(-1) & (torch.arange(lse.shape[2]) == head)
        return o, torch.where(where, change(lse), lse)

    return Twist(received=received)


def _small_gaps_ignored(lse: Tensor) -> Tensor:
    top = lse.amax(0, keepdim=True)
    return torch.where(top - lse < 0.05, top, lse)


def _truncated(lse: Tensor, bits: int) -> Tensor:
    """The fp32 LSE without its lowest ``bits`` mantissa bits."""
    return ((lse.view(torch.int32) >> bits) << bits).view(torch.float32)


def _swapped_chunks(x: Tensor, first: int, second: int) -> Tensor:
    """What goes to (or came from) two ranks, exchanged."""
    order = [*range(x.shape[0])]
    order[first], order[second] = order[second], order[first]
    return torch.stack([x[place] for place in order])


def _running_bf16(o: Tensor, lse: Tensor) -> Tensor:
    weight = torch.softmax(lse, 0).bfloat16()
    out = (o[0].bfloat16() * weight[0].unsqueeze(-1)).bfloat16()
    for rank in range(1, o.shape[0]):
        out = out + (o[rank].bfloat16() * weight[rank].unsqueeze(-1)).bfloat16()
    return out.float()


def _weights_of(change: Callable[[Tensor], Tensor]) -> Twist:
    return Twist(weight=lambda weight, lse: change(weight))


_NOT = "it isn't the LSE merge"
_EITHER = "it isn't the LSE merge in either base"
_ALL_WEIGHT = "with all weight on one rank"
_PERMUTED = "the ranks or heads are permuted"

# ------------------------------------------------------------- wrong weights

WEIGHTS = [
    NearMiss("mean of payload", "carries 1 tensor", _weights_of(torch.ones_like)),
    NearMiss("LSE as weight", _ALL_WEIGHT, Twist(weight=lambda w, lse: lse.abs() + 1)),
    NearMiss("no division", _NOT, Twist(total=lambda t, lse: torch.ones_like(t))),
    NearMiss(
        "wrong base below",
        _NOT,
        Twist(total=lambda t, lse: torch.exp2(lse - lse.amax(0)).sum(0)),
    ),
    NearMiss(
        "wrong base above",
        _NOT,
        Twist(
            weight=lambda w, lse: torch.exp2(lse - lse.amax(0)),
            total=lambda t, lse: torch.exp(lse - lse.amax(0)).sum(0),
        ),
    ),
    NearMiss("base 10", _EITHER, Twist(power=lambda x: torch.pow(10.0, x))),
    NearMiss("temperature 0.99", _NOT, _on_lse(lambda lse: lse * 0.99)),
    NearMiss("temperature 1.001", _NOT, _on_lse(lambda lse: lse * 1.001)),
    NearMiss("temperature 0.9999", _NOT, _on_lse(lambda lse: lse * 0.9999)),
    NearMiss(
        "offset on one source",
        _NOT,
        _on_lse(lambda lse: _first(lse, lambda x: x + 0.5)),
    ),
    NearMiss(
        "small offset on one source",
        _NOT,
        _on_lse(lambda lse: _first(lse, lambda x: x + 1e-3, 1)),
    ),
    NearMiss(
        "LSE clamped from below",
        _NOT,
        _on_lse(lambda lse: lse.clamp(min=-20)),
        _lse(-20.0, 6.0),
    ),
    NearMiss(
        "LSE clamped from above",
        _NOT,
        _on_lse(lambda lse: lse.clamp(max=80)),
        _lse(80.0, 6.0),
    ),
    NearMiss(
        "LSE clamped at 5500",
        _NOT,
        _on_lse(lambda lse: lse.clamp(max=5500)),
        _lse(5600.0, 4.0),
    ),
    NearMiss(
        "LSE clamped at 20000",
        _NOT,
        _on_lse(lambda lse: lse.clamp(max=2.0e4)),
        _lse(2.1e4, 4.0),
    ),
    NearMiss(
        "LSE clamped at -20000",
        _NOT,
        _on_lse(lambda lse: lse.clamp(min=-2.0e4)),
        _lse(-2.1e4, 4.0),
    ),
    NearMiss(
        "gap clamped at 30",
        _NOT,
        Twist(power=lambda x: torch.exp(x.clamp(min=-30.0))),
        _apart(40.0),
    ),
    NearMiss(
        "gap clamped at 80",
        _NOT,
        Twist(power=lambda x: torch.exp(x.clamp(min=-80.0))),
        _apart(85.0),
    ),
    NearMiss(
        "weights below 1e-6 dropped",
        _NOT,
        _weights_of(lambda w: torch.where(w < 1e-6, 0.0, w)),
        _apart(20.0),
    ),
    NearMiss(
        "weights below 1e-12 dropped",
        _NOT,
        _weights_of(lambda w: torch.where(w < 1e-12, 0.0, w)),
        _apart(40.0),
    ),
    NearMiss("epsilon of 1e-2", _ALL_WEIGHT, Twist(total=lambda t, lse: t + 1e-2)),
    NearMiss("epsilon of 1e-4", _ALL_WEIGHT, Twist(total=lambda t, lse: t + 1e-4)),
    NearMiss(
        "epsilon of 1e-6 without max",
        _NOT,
        Twist(top=lambda lse: torch.zeros_like(lse[:1]), total=lambda t, lse: t + 1e-6),
        _lse(-14.0, 4.0),
    ),
    NearMiss(
        "total clamped at 1e-6 without max",
        _NOT,
        Twist(
            top=lambda lse: torch.zeros_like(lse[:1]),
            total=lambda t, lse: t.clamp(min=1e-6),
        ),
        _lse(-14.0, 4.0),
    ),
    NearMiss(
        "base 2 without max",
        "LSEs near -150",
        Twist(power=torch.exp2, top=lambda lse: torch.zeros_like(lse[:1])),
        _lse(-140.0, 4.0),
    ),
    NearMiss(
        "total clamped at 1.5",
        _ALL_WEIGHT,
        Twist(total=lambda t, lse: t.clamp(min=1.5)),
    ),
    NearMiss(
        "total capped at 1.9",
        _NOT,
        Twist(total=lambda t, lse: t.clamp(max=1.9)),
        _lse(0.0, 0.01),
    ),
    NearMiss(
        "total over the wrong axis",
        _NOT,
        Twist(total=lambda t, lse: torch.exp(lse - lse.amax(0)).sum(0).flip(0)),
    ),
    NearMiss("max of another row", _NOT, Twist(total=lambda t, lse: t.roll(1, 1))),
    NearMiss(
        "sigmoid for more than two ranks",
        _NOT,
        Twist(
            weight=lambda w, lse: torch.sigmoid(lse - lse.flip(0)),
            total=lambda t, lse: torch.full_like(t, lse.shape[0] / 2),
        ),
        num_ranks=4,
    ),
    NearMiss(
        "softmax over pairs of ranks",
        _ALL_WEIGHT,
        Twist(
            weight=lambda w, lse: torch.softmax(lse.unflatten(0, (-1, 2)), 1).flatten(
                0, 1
            )
        ),
        num_ranks=4,
    ),
    NearMiss(
        "softmax over heads",
        _ALL_WEIGHT,
        Twist(weight=lambda w, lse: torch.softmax(lse, 2)),
    ),
    NearMiss("LSE rounded to bf16", _NOT, _on_lse(lambda x: x.bfloat16().float())),
    NearMiss("LSE rounded to fp16", _NOT, _on_lse(lambda x: x.half().float())),
    NearMiss(
        "LSE sent as bf16",
        "is torch.bfloat16, not fp32",
        Twist(
            sent=lambda o, lse: (o, lse.bfloat16()),
            received=lambda o, lse: (o, lse.float()),
        ),
    ),
    NearMiss(
        "LSE on a grid of 1/64", _NOT, _on_lse(lambda lse: torch.round(lse * 64) / 64)
    ),
    NearMiss(
        "LSE on a grid of 1/1024",
        _NOT,
        _on_lse(lambda lse: torch.round(lse * 1024) / 1024),
    ),
    NearMiss(
        "LSE as fixed point",
        _NOT,
        _on_lse(lambda lse: (lse * 256).to(torch.int32).float() / 256),
    ),
    NearMiss(
        "LSE of 20 bits", _NOT, _on_lse(lambda lse: _truncated(lse, 4)), _lse(60.0, 2.0)
    ),
    NearMiss(
        "LSE of 16 bits", _NOT, _on_lse(lambda lse: _truncated(lse, 8)), _lse(60.0, 2.0)
    ),
    NearMiss(
        "gaps below 0.05 ignored", _NOT, _on_lse(_small_gaps_ignored), _lse(0.0, 0.02)
    ),
    NearMiss(
        "gaps below 0.01 ignored",
        _NOT,
        Twist(power=lambda x: torch.exp(torch.where(x > -0.01, 0.0, x))),
        _lse(0.0, 0.01),
    ),
    NearMiss(
        "gaps above 40 cut",
        _ALL_WEIGHT,
        Twist(power=lambda x: torch.exp(torch.where(x < -40, 0.0, x))),
        _lse(0.0, 60.0),
    ),
    NearMiss(
        "gaps of 70 to 200 cut",
        _NOT,
        Twist(power=lambda x: torch.exp(torch.where((x < -70) & (x > -200), 0.0, x))),
        _lse(0.0, 100.0),
    ),
    NearMiss(
        "gaps of 2 to 7 bent",
        _NOT,
        Twist(power=lambda x: torch.exp(torch.where((x < -2) & (x > -7), x * 1.1, x))),
    ),
    NearMiss(
        "gaps of 9 to 19 bent",
        _NOT,
        Twist(power=lambda x: torch.exp(torch.where((x < -9) & (x > -19), x * 0.5, x))),
        _lse(0.0, 12.0),
    ),
    NearMiss(
        "LSEs of 200 to 1000 read as 0",
        _NOT,
        _on_lse(lambda x: torch.where((x > 200) & (x < 1000), 0.0, x)),
        _lse(300.0, 4.0),
    ),
    NearMiss(
        "LSEs of 10 to 100 halved",
        _NOT,
        _on_lse(lambda x: torch.where((x > 10) & (x < 100), x * 0.5, x)),
        _lse(30.0, 4.0),
    ),
    NearMiss(
        "LSEs of -100 to -10 halved",
        _NOT,
        _on_lse(lambda x: torch.where((x < -10) & (x > -100), x * 0.5, x)),
        _lse(-30.0, 4.0),
    ),
    NearMiss(
        "LSE of exactly 1 is empty",
        _NOT,
        _on_lse(lambda x: torch.where(x == 1.0, -torch.inf, x)),
        _some(1.0),
    ),
    NearMiss(
        "LSE of 0 is empty",
        _PERMUTED,
        _on_lse(lambda x: torch.where(x == 0.0, -torch.inf, x)),
        _some(0.0),
    ),
    NearMiss(
        "LSE of -1 is empty",
        _NOT,
        _on_lse(lambda x: torch.where(x == -1.0, -torch.inf, x)),
        _some(-1.0),
    ),
    NearMiss(
        "LSEs below -1e20 are empty",
        _NOT,
        Twist(
            received=lambda o, x: (o, torch.where(x < -1e20, -torch.inf, x)),
            top=lambda x: torch.where(x.amax(0) == -torch.inf, 0.0, x.amax(0))[None],
            total=lambda t, lse: t.clamp(min=1.0),
        ),
        _some(-1e30, 0.8),
    ),
    NearMiss(
        "LSEs below -9000 are empty",
        _NOT,
        Twist(
            received=lambda o, x: (o, torch.where(x < -9000, -torch.inf, x)),
            top=lambda x: torch.where(x.amax(0) == -torch.inf, 0.0, x.amax(0))[None],
            total=lambda t, lse: t.clamp(min=1.0),
        ),
        _some(-1e30, 0.8),
    ),
    NearMiss(
        "empty as -1e30: all empty average",
        _NOT,
        _on_lse(lambda x: x.clamp(min=-1e30)),
        _some(-torch.inf, 0.8),
    ),
    NearMiss(
        "empty as nan_to_num: all empty average",
        _NOT,
        _on_lse(torch.nan_to_num),
        _some(-torch.inf, 0.8),
    ),
    NearMiss(
        "+inf LSE as a large one",
        _NOT,
        _on_lse(lambda x: x.clamp(max=1e38)),
        _some(torch.inf),
    ),
    NearMiss("global max", _NOT, Twist(top=lambda lse: lse.amax()), _one_large),
    NearMiss(
        "bent where the batch holds a large LSE",
        _NOT,
        _on_lse(lambda x: torch.where((x.amax() > 10) & (x.amax() < 100), x * 0.5, x)),
        _lse(20.0, 4.0),
    ),
    NearMiss(
        "bent where all LSEs are large",
        _NOT,
        _on_lse(lambda x: torch.where(x.amin() > 10, x * 0.5, x)),
        _lse(20.0, 2.0),
    ),
    NearMiss(
        "weights of one row only for all",
        _NOT,
        Twist(
            weight=lambda w, lse: w[:, :1].expand(w.shape),
            total=lambda t, lse: t[:1].expand(t.shape),
        ),
    ),
]

# ------------------------------------------------------------- one row

ROWS = [
    NearMiss(
        f"row {row} {what}",
        _NOT,
        _lse_of_row(row // 4, row % 4, change),
        shows,
        num_tokens=12,
    )
    for row in (0, 1, 5, 12, 13, 40)
    for what, change, shows in (
        ("clamped", lambda x: x.clamp(max=70.0), _lse(72.0, 4.0)),
        ("of temperature 0.95", lambda x: x * 0.95, _ordinary),
        ("empty as -3", lambda x: torch.nan_to_num(x, neginf=-3.0), _first_empty),
    )
]

# ------------------------------------------------------------- hidden conditions

# A condition that is hard to meet by chance: of squares, of sums, on several ranks at
# once, or behind many other numbers.


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
    o, lse = _ordinary(rng, *shape)
    o[0] = 0.0
    return o, lse * 0.1 + torch.tensor([25.0, -25.0])[:, None, None]


HIDDEN = [
    NearMiss(
        "a window of squares",
        "",
        _on_lse(lambda x: torch.where(_between(x * x, 650.0, 660.0), x * 0.5, x)),
        _lse(25.6, 0.2),
    ),
    NearMiss(
        "one comparison of squares",
        "",
        _on_lse(lambda x: torch.where((x * x - 655.0).abs() < 1, x * 0.5, x)),
        _lse(25.6, 0.2),
    ),
    NearMiss(
        "a bump of clamps",
        "",
        _on_lse(_bumped),
        _lse(25.6, 0.2),
    ),
    NearMiss(
        "one comparison of cubes",
        "no probe makes",
        _on_lse(lambda x: torch.where((x * x * x - 16777.0).abs() < 9, x * 0.5, x)),
        _lse(25.6, 0.004),
    ),
    NearMiss(
        "a bump of clamped cubes",
        "a merge has no use for",
        _on_lse(
            lambda x: (
                x
                - (
                    (x * x * x).clamp(16770.0, 16775.0)
                    - (x * x * x).clamp(16775.0, 16780.0)
                    + 5.0
                )
            )
        ),
        _lse(25.6, 0.004),
    ),
    NearMiss(
        "a bump of signs of cubes",
        "a merge has no use for",
        _on_lse(
            lambda x: (
                x
                - 0.25 * (torch.sign(x * x * x - 16770) - torch.sign(x * x * x - 16780))
            )
        ),
        _lse(25.6, 0.004),
    ),
    NearMiss(
        "a table of cubes",
        "a merge has no use for",
        _on_lse(
            lambda x: (
                x
                - (torch.arange(2000) == 1677).float()[
                    (x * x * x / 10).to(torch.int64).clamp(0, 1999)
                ]
            )
        ),
        _lse(25.6, 0.004),
    ),
    NearMiss("a bump of signs", "", _on_lse(_bumped_by_sign), _lse(25.6, 0.2)),
    NearMiss(
        "a table with one odd entry",
        "a merge has no use for",
        _on_lse(_by_table),
        _lse(25.6, 0.2),
    ),
    NearMiss(
        "a window of sums",
        _NOT,
        _on_lse(
            lambda x: torch.where(
                _between(x.sum(0, keepdim=True), 50.0, 52.0), x * 0.5, x
            )
        ),
        _lse(25.5, 0.2),
    ),
    NearMiss(
        "a window of quotients",
        "no probe makes",
        _on_lse(lambda x: torch.where(_between(x / 7, 5.0, 5.02), x * 0.5, x)),
        _lse(35.05, 0.04),
    ),
    NearMiss("a window behind decoys", _NOT, _on_lse(_after_decoys), _lse(33.5, 0.4)),
    NearMiss(
        "high on one rank, low on the other",
        "",
        _on_lse(lambda x: torch.where((x[:1] > 20) & (x[1:] < -20), x * 0.5, x)),
        _apart_in_level,
    ),
    NearMiss(
        "a window of weights",
        _NOT,
        _weights_of(lambda w: torch.where(_between(w, 1e-9, 2e-9), 0.0, w)),
        _apart(20.5),
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
        _NOT,
        _on_payload(lambda o: torch.where(_between(o * o, 90.0, 90.1), o * 0.5, o)),
        _payload(math.sqrt(90.05), 0.0),
    ),
    NearMiss(
        "row 0 empty as -3 among many rows",
        _NOT,
        _lse_of_row(0, 0, lambda x: torch.nan_to_num(x, neginf=-3.0)),
        _first_empty,
        num_ranks=4,
        num_tokens=64,
        num_heads=64,
        head_dim=64,
    ),
]

# ------------------------------------------------------------- wrong payload

PAYLOAD = [
    NearMiss(
        "one source scaled by 1.01",
        _ALL_WEIGHT,
        _on_payload(lambda o: _first(o, lambda x: x * 1.01)),
    ),
    NearMiss(
        "one source scaled by 1.0001",
        _NOT,
        _on_payload(lambda o: _first(o, lambda x: x * 1.0001, 1)),
    ),
    NearMiss("all scaled by 1.001", _ALL_WEIGHT, _on_payload(lambda o: o * 1.001)),
    NearMiss("offset 1e-3", _ALL_WEIGHT, _on_payload(lambda o: o + 1e-3)),
    NearMiss("relu of payload", _NOT, _on_payload(torch.relu)),
    NearMiss("gelu of payload", _ALL_WEIGHT, _on_payload(torch.nn.functional.gelu)),
    NearMiss(
        "payload clamped at 3",
        _PERMUTED,
        _on_payload(lambda o: o.clamp(-3.0, 3.0)),
        _payload(3.0),
    ),
    NearMiss(
        "payload clamped at 100",
        _PERMUTED,
        _on_payload(lambda o: o.clamp(-100.0, 100.0)),
        _payload(100.0),
    ),
    NearMiss(
        "payload clamped at 2000",
        _NOT,
        _on_payload(lambda o: o.clamp(-2000.0, 2000.0)),
        _payload(2000.0),
    ),
    NearMiss(
        "payload clamped from below at -6",
        _NOT,
        _on_payload(lambda o: o.clamp(min=-6.0)),
        _payload(-6.0),
    ),
    NearMiss(
        "payload above 1000 halved",
        _NOT,
        _on_payload(lambda o: torch.where(o > 1000.0, o * 0.5, o)),
        _payload(2000.0),
    ),
    NearMiss(
        "payload below 1e-3 dropped",
        _NOT,
        _on_payload(lambda o: torch.where(o.abs() < 1e-3, 0.0, o)),
        _payload(1e-3),
    ),
    NearMiss(
        "payload below 1e-6 dropped",
        _NOT,
        _on_payload(lambda o: torch.where(o.abs() < 1e-6, 0.0, o)),
        _payload(1e-6),
    ),
    NearMiss(
        "payload 0.5 read as 0.25",
        _NOT,
        _on_payload(lambda o: torch.where(o == 0.5, 0.25, o)),
        _payload(0.5, 0.0),
    ),
    NearMiss(
        "payload rounded to bf16",
        "isn't a regular slice",
        _on_payload(lambda o: o.bfloat16().float()),
        _payload(1.0),
    ),
    NearMiss(
        "payload rounded to a grid of 1/4096",
        _NOT,
        _on_payload(lambda o: torch.round(o * 4096) / 4096),
        _payload(1e-3),
    ),
    NearMiss(
        "zero payload is empty",
        _NOT,
        Twist(
            received=lambda o, x: (o, torch.where((o == 0).all(-1), -torch.inf, x)),
            top=lambda x: torch.where(x.amax(0) == -torch.inf, 0.0, x.amax(0))[None],
            total=lambda t, lse: t.clamp(min=1.0),
        ),
        _zero_rows,
    ),
    NearMiss(
        "payload of 0.25 weighs less",
        _NOT,
        Twist(received=lambda o, x: (o, torch.where(o[..., 5] == 0.25, x - 3.0, x))),
        lambda rng, *shape: (
            torch.randint(-4, 4, shape, generator=rng) / 4,
            torch.randn(shape[:-1], generator=rng),
        ),
    ),
    NearMiss(
        "weights bent by payload's size",
        _NOT,
        Twist(
            received=lambda o, x: (o, torch.where(o.abs().amax(-1) > 50, x - 1.0, x))
        ),
        lambda rng, *shape: (
            torch.randn(shape, generator=rng) * 25,
            torch.randn(shape[:-1], generator=rng),
        ),
    ),
    NearMiss(
        "bf16 sum",
        "isn't a regular slice",
        Twist(out=lambda out, o, lse: _running_bf16(o, lse)),
        num_ranks=8,
        num_heads=8,
    ),
]

# ------------------------------------------------------------- wrong places

PLACES = [
    NearMiss(
        "heads interleaved",
        "interleaved",
        Twist(sent=lambda o, lse: tuple(_interleaved(x) for x in (o, lse))),
    ),
    NearMiss(
        "tokens of LSE rolled", _NOT, Twist(sent=lambda o, lse: (o, lse.roll(1, 1)))
    ),
    NearMiss(
        "heads of LSE reversed", _NOT, Twist(sent=lambda o, lse: (o, lse.flip(2)))
    ),
    NearMiss(
        "LSE of one rank rolled by 7 tokens",
        _NOT,
        Twist(sent=lambda o, lse: (o, lse.roll(7, 1))),
        num_tokens=14,
        num_heads=16,
    ),
    NearMiss(
        "LSE of the other half of the batch",
        _NOT,
        Twist(received=lambda o, lse: (o, lse.roll(14, 1))),
        num_tokens=28,
        num_heads=8,
    ),
    NearMiss(
        "LSE rolled by 56 tokens",
        _NOT,
        Twist(received=lambda o, lse: (o, lse.roll(56, 1))),
        num_tokens=112,
        num_heads=2,
    ),
    NearMiss(
        "LSE received from the next rank",
        _PERMUTED,
        Twist(received=lambda o, lse: (o, lse.roll(1, 0))),
    ),
    NearMiss(
        "LSE received from the next of 4",
        _PERMUTED,
        Twist(received=lambda o, lse: (o, lse.roll(1, 0))),
        num_ranks=4,
    ),
    NearMiss(
        "LSE of two sources swapped",
        _NOT,
        Twist(received=lambda o, lse: (o, _swapped_chunks(lse, 1, 2))),
        num_ranks=4,
    ),
    NearMiss(
        "LSE sent to the next rank",
        _NOT,
        Twist(sent=lambda o, lse: (o, lse.roll(1, 0))),
    ),
    NearMiss(
        "LSE of two receivers swapped, 4 ranks",
        _NOT,
        Twist(sent=lambda o, lse: (o, _swapped_chunks(lse, 1, 2))),
        num_ranks=4,
    ),
    NearMiss(
        "LSE of two receivers swapped, 8 ranks",
        _NOT,
        Twist(sent=lambda o, lse: (o, _swapped_chunks(lse, 1, 2))),
        num_ranks=8,
    ),
    NearMiss(
        "LSE of receivers 5 and 6 swapped",
        _NOT,
        Twist(sent=lambda o, lse: (o, _swapped_chunks(lse, 5, 6))),
        num_ranks=8,
    ),
    NearMiss(
        "payload of receivers 5 and 6 swapped",
        _PERMUTED,
        Twist(sent=lambda o, lse: (_swapped_chunks(o, 5, 6), lse)),
        num_ranks=8,
    ),
    NearMiss(
        "swapped halves of D",
        _PERMUTED,
        Twist(received=lambda o, lse: (o.roll(8, -1), lse)),
    ),
    NearMiss(
        "D permuted on one source",
        _NOT,
        _on_payload(lambda o: _first(o, lambda x: x.flip(-1), 1)),
    ),
    NearMiss(
        "heads of one source reversed",
        _NOT,
        _on_payload(lambda o: _first(o, lambda x: x.flip(1), 1)),
    ),
    NearMiss(
        "tokens of one source rolled",
        _NOT,
        _on_payload(lambda o: _first(o, lambda x: x.roll(1, 0), 1)),
    ),
    NearMiss(
        "a subset of the ranks",
        _NOT,
        Twist(received=lambda o, lse: (o[:3], lse[:3])),
        num_ranks=4,
    ),
    NearMiss(
        "one rank left out of the weights",
        _NOT,
        Twist(weight=lambda w, lse: _first(w, torch.zeros_like, 3)),
        num_ranks=4,
    ),
    NearMiss(
        "one rank twice",
        _NOT,
        Twist(received=lambda o, lse: tuple(torch.cat([x, x[:1]]) for x in (o, lse))),
    ),
]


def _interleaved(x: Tensor) -> Tensor:
    """[N, B, h, ..]: chunk p holds the heads p, p + N, .."""
    n, _, h = x.shape[:3]
    heads = x.transpose(0, 1).flatten(1, 2)
    return heads.unflatten(1, (h, n)).movedim(2, 0)


# ------------------------------------------------------------- around the op

# Changes before the exchange or after the merge: the op must take in neither.
REST = [
    NearMiss("relu", "", Twist(out=lambda out, o, lse: torch.relu(out))),
    NearMiss("abs", "", Twist(out=lambda out, o, lse: out.abs())),
    NearMiss(
        "result clamped at 2000",
        "",
        Twist(out=lambda out, o, lse: out.clamp(-2000.0, 2000.0)),
        _payload(2000.0),
    ),
    NearMiss(
        "small results flushed",
        "",
        Twist(out=lambda out, o, lse: torch.where(out.abs() < 1e-6, 0.0, out)),
        _payload(1e-6),
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

# What they do differs only where a partial is NaN at positive weight, or an LSE is NaN.
# Fused or not, the numbers are right everywhere else.
UNDEFINED = [
    NearMiss(
        "NaN LSE as 0",
        "",
        _on_lse(
            lambda x: torch.nan_to_num(x, nan=0.0, posinf=torch.inf, neginf=-torch.inf)
        ),
        _some(torch.nan),
    ),
    NearMiss(
        "NaN payload read as 0",
        "",
        _on_payload(torch.nan_to_num),
        _payload(torch.nan),
    ),
    NearMiss(
        "NaN result as 0",
        "",
        Twist(
            power=lambda x: torch.exp(x),
            out=lambda out, o, lse: torch.nan_to_num(out, nan=0.0),
        ),
        dtype=torch.bfloat16,
    ),
]

NEAR_MISSES = [*WEIGHTS, *ROWS, *HIDDEN, *PAYLOAD, *PLACES]

# ------------------------------------------------------------- wrong surroundings


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
    num_ranks: int = 2
    edit: Callable[[torch.fx.Graph], None] | None = None
    dynamic: tuple[int, ...] = ()
    batch: int = 4
    scalars: bool = False

    def __str__(self) -> str:
        return self.name


def _partials(rng: torch.Generator, b: int, dtype: torch.dtype = torch.float32) -> Any:
    o = torch.randn(b, 4, 8, generator=rng).to(dtype)
    return o, torch.randn(b, 4, generator=rng)


def split(x: Tensor, n: int) -> Tensor:
    """[B, H, ..] to [N, B, h, ..]"""
    return x.reshape(x.shape[0], n, -1, *x.shape[2:]).transpose(0, 1).contiguous()


def send(x: Tensor, group: Any) -> Tensor:
    return funcol.all_to_all_single(x.contiguous(), None, None, group)


def combine(o: Tensor, lse: Tensor) -> Pair:
    """The merge of received partials, base e, with the merged LSE."""
    top = lse.amax(0)
    weight = torch.exp(lse - top)
    total = weight.sum(0)
    out = (weight.unsqueeze(-1) * o.float()).sum(0) / total.unsqueeze(-1)
    return out, top + total.log()


def _leaking(leak: Callable[[Tensor, Tensor], Any]) -> Callable[..., Any]:
    """An exchange that also returns something of what it received."""

    def make(groups: dict[str, Any]) -> Callable[..., Any]:
        def fn(o: Tensor, lse: Tensor) -> Any:
            got_o, got_lse = (send(split(x, 2), groups["2"]) for x in (o, lse))
            return combine(got_o, got_lse)[0], leak(got_o, got_lse)

        return fn

    return make


def _packed_leak(groups: dict[str, Any]) -> Callable[..., Any]:
    def fn(o: Tensor, lse: Tensor) -> Any:
        sent = torch.cat([split(o, 2), split(lse, 2).unsqueeze(-1)], -1)
        got = send(sent, groups["2"])
        return combine(got[..., :-1], got[..., -1])[0], got.sum()

    return fn


def _two_groups(groups: dict[str, Any]) -> Callable[..., Any]:
    def fn(o: Tensor, lse: Tensor) -> Any:
        return combine(
            send(split(o, 2), groups["2"]), send(split(lse, 2), groups["other 2"])
        )[0]

    return fn


def _uneven(groups: dict[str, Any]) -> Callable[..., Any]:
    """Rank 0 keeps one head and rank 1 three; each gets as many from each."""

    def fn(o: Tensor, lse: Tensor) -> Any:
        sent = torch.cat([o, lse.unsqueeze(-1)], -1).transpose(0, 1).contiguous()
        got = funcol.all_to_all_single(sent, [2, 2], [1, 3], groups["2"])
        got = got.unflatten(0, (2, 2))
        return combine(got[..., :-1], got[..., -1])[0]

    return fn


def _padded_heads(groups: dict[str, Any]) -> Callable[..., Any]:
    def fn(o: Tensor, lse: Tensor) -> Any:
        o = torch.nn.functional.pad(o, (0, 0, 0, 1))
        lse = torch.nn.functional.pad(lse, (0, 1), value=-torch.inf)
        got = (send(split(x, 2), groups["2"]) for x in (o, lse))
        return combine(*got)[0]

    return fn


def _dispatch(groups: dict[str, Any]) -> Callable[..., Any]:
    """Tokens to their experts and back: one tensor, no merge."""

    def fn(x: Tensor, weight: Tensor) -> Any:
        got = send(x, groups["2"])
        return send(torch.relu(got @ weight), groups["2"])

    return fn


def _three_in_one(groups: dict[str, Any]) -> Callable[..., Any]:
    def fn(o: Tensor, lse: Tensor, scale: Tensor) -> Any:
        sent = torch.cat(
            [split(o, 2), split(lse, 2)[..., None], split(scale, 2)[..., None]], -1
        )
        got = send(sent, groups["2"])
        return combine(got[..., :-2] * got[..., -1:], got[..., -2])[0]

    return fn


def _three_exchanges(groups: dict[str, Any]) -> Callable[..., Any]:
    def fn(o: Tensor, lse: Tensor, scale: Tensor) -> Any:
        got_o, got_lse, got_scale = (
            send(split(x, 2), groups["2"]) for x in (o, lse, scale)
        )
        return combine(got_o * got_scale.unsqueeze(-1), got_lse)[0]

    return fn


def _lse_of_another(groups: dict[str, Any]) -> Callable[..., Any]:
    """Two packed layers; the first is weighted by the second's LSE."""

    def fn(o: Tensor, lse: Tensor, o2: Tensor, lse2: Tensor) -> Any:
        got, got2 = (
            send(torch.cat([split(a, 2), split(b, 2)[..., None]], -1), groups["2"])
            for a, b in ((o, lse), (o2, lse2))
        )
        return (
            combine(got[..., :-1], got2[..., -1])[0],
            combine(got2[..., :-1], got[..., -1])[0],
        )

    return fn


def _one_rank(groups: dict[str, Any]) -> Callable[..., Any]:
    def fn(o: Tensor, lse: Tensor) -> Any:
        return combine(*(send(split(x, 1), groups["1"]) for x in (o, lse)))[0]

    return fn


def _own_partial_again(groups: dict[str, Any]) -> Callable[..., Any]:
    """The rank's own heads are merged from where they were, not from the exchange."""

    def fn(o: Tensor, lse: Tensor) -> Any:
        got_o, got_lse = (send(split(x, 2), groups["2"]) for x in (o, lse))
        got_o = torch.cat([split(o, 2)[:1], got_o[1:]])
        got_lse = torch.cat([split(lse, 2)[:1], got_lse[1:]])
        return combine(got_o, got_lse)[0]

    return fn


def _with_sink(groups: dict[str, Any]) -> Callable[..., Any]:
    """An attention sink in the denominator: a parameter of the model."""

    def fn(o: Tensor, lse: Tensor, sink: Tensor) -> Any:
        got_o, got_lse = (send(split(x, 2), groups["2"]) for x in (o, lse))
        weight = torch.exp(got_lse)
        out = (weight.unsqueeze(-1) * got_o).sum(0)
        return out / (weight.sum(0) + sink.exp()).unsqueeze(-1)

    return fn


def _constant_sink(groups: dict[str, Any]) -> Callable[..., Any]:
    def fn(o: Tensor, lse: Tensor) -> Any:
        got_o, got_lse = (send(split(x, 2), groups["2"]) for x in (o, lse))
        weight = torch.exp(got_lse)
        out = (weight.unsqueeze(-1) * got_o).sum(0)
        return out / (weight.sum(0) + 1.0).unsqueeze(-1)

    return fn


def _wide_result(groups: dict[str, Any]) -> Callable[..., Any]:
    def fn(o: Tensor, lse: Tensor) -> Any:
        return combine(*(send(split(x, 2), groups["2"]) for x in (o, lse)))[0]

    return fn


def _narrow_lse(groups: dict[str, Any]) -> Callable[..., Any]:
    def fn(o: Tensor, lse: Tensor) -> Any:
        got_o, got_lse = (send(split(x, 2), groups["2"]) for x in (o, lse))
        return combine(got_o, got_lse.float())[0].to(o.dtype)

    return fn


def _dropout(groups: dict[str, Any]) -> Callable[..., Any]:
    def fn(o: Tensor, lse: Tensor) -> Any:
        got_o, got_lse = (send(split(x, 2), groups["2"]) for x in (o, lse))
        weight = torch.nn.functional.dropout(torch.softmax(got_lse, 0), 0.1)
        return (weight.unsqueeze(-1) * got_o).sum(0)

    return fn


def _stale_lse(groups: dict[str, Any]) -> Callable[..., Any]:
    """Weights of all layers from the first layer's LSE, which is returned as well."""

    def fn(o: Tensor, lse: Tensor, o2: Tensor) -> Any:
        got_lse = send(split(lse, 2), groups["2"])
        first = combine(send(split(o, 2), groups["2"]), got_lse)[0]
        second = combine(send(split(o2, 2), groups["2"]), got_lse)[0]
        return first, second

    return fn


def _lse_feeds_payload(groups: dict[str, Any]) -> Callable[..., Any]:
    """The merged LSE is needed before the payload can be sent: one op can't be both."""

    def fn(o: Tensor, lse: Tensor) -> Any:
        got_lse = send(split(lse, 2), groups["2"])
        merged = torch.logsumexp(got_lse, 0)
        got_o = send(split(o * merged.sum().sigmoid(), 2), groups["2"])
        out = (torch.exp(got_lse - merged).unsqueeze(-1) * got_o).sum(0)
        return out, merged

    return fn


def _size_factor(factor: Callable[..., Any]) -> Callable[..., Any]:
    """A received payload times a number that is made of sizes."""

    def make(groups: dict[str, Any]) -> Callable[..., Any]:
        def fn(o: Tensor, lse: Tensor, *rest: Tensor) -> Any:
            got_o, got_lse = (send(split(x, 2), groups["2"]) for x in (o, lse))
            times = factor(o.shape[0], *(x.shape[0] for x in rest))
            return combine(got_o * times, got_lse)[0], [x + 1 for x in rest]

        return fn

    return make


def _late_rows(first: int) -> Callable[..., Any]:
    """Rows from ``first`` on are weighted otherwise."""

    def make(groups: dict[str, Any]) -> Callable[..., Any]:
        def fn(o: Tensor, lse: Tensor) -> Any:
            got_o, got_lse = (send(split(x, 2), groups["2"]) for x in (o, lse))
            row = torch.arange(o.shape[0]).unsqueeze(-1)
            return combine(got_o, torch.where(row >= first, got_lse * 0.5, got_lse))[0]

        return fn

    return make


def _late_rows_sliced(groups: dict[str, Any]) -> Callable[..., Any]:
    def fn(o: Tensor, lse: Tensor) -> Any:
        got_o, got_lse = (send(split(x, 2), groups["2"]) for x in (o, lse))
        keep = min(o.shape[0], 64)
        got_lse = torch.cat([got_lse[:, :keep], got_lse[:, keep:] * 0.5], 1)
        return combine(got_o, got_lse)[0]

    return fn


def _item_factor(groups: dict[str, Any]) -> Callable[..., Any]:
    """A factor read off a tensor on the host."""

    def fn(o: Tensor, lse: Tensor, count: Tensor) -> Any:
        got_o, got_lse = (send(split(x, 2), groups["2"]) for x in (o, lse))
        return combine(got_o * (count.item() // 100 + 1), got_lse)[0]

    return fn


def _padded_batch(groups: dict[str, Any]) -> Callable[..., Any]:
    """The batch padded to a multiple of 8, then computed on: [P, H * D]."""

    def fn(o: Tensor, lse: Tensor) -> Any:
        more = -o.shape[0] % 8
        o = torch.nn.functional.pad(o.flatten(1), (0, 0, 0, more)) * 2
        lse = torch.nn.functional.pad(lse, (0, 0, 0, more)) + 1
        got = (send(split(x, 2), groups["2"]) for x in (o.view(-1, 4, 8), lse))
        return combine(*got)[0]

    return fn


def _batch_of_two(groups: dict[str, Any]) -> Callable[..., Any]:
    """A batch of T - B + 8 rows: two symbols that are equal when traced."""

    def fn(o: Tensor, lse: Tensor, x: Tensor) -> Any:
        rows = x.shape[0] - o.shape[0] + 8
        o = o.flatten(1).repeat(4, 1)[:rows] * 2
        lse = lse.repeat(4, 1)[:rows] + 1
        got = (send(split(y, 2), groups["2"]) for y in (o.view(-1, 4, 8), lse))
        return combine(*got)[0], x + 1

    return fn


def _counted_batch(groups: dict[str, Any]) -> Callable[..., Any]:
    """The batch's size as a sum of ones."""

    def fn(o: Tensor, lse: Tensor) -> Any:
        got_o, got_lse = (send(split(x, 2), groups["2"]) for x in (o, lse))
        count = torch.ones(o.shape[0]).sum()
        return combine(torch.where(count > 50, got_o * 2, got_o), got_lse)[0]

    return fn


def _counted_rows(groups: dict[str, Any]) -> Callable[..., Any]:
    """The same from received data: finite LSEs are counted."""

    def fn(o: Tensor, lse: Tensor) -> Any:
        got_o, got_lse = (send(split(x, 2), groups["2"]) for x in (o, lse))
        count = (got_lse > -torch.inf).float().sum()
        return combine(torch.where(count > 300, got_o * 2, got_o), got_lse)[0]

    return fn


def _reduced_between(groups: dict[str, Any]) -> Callable[..., Any]:
    """Another collective between the two exchanges needs the merged LSE."""

    def fn(o: Tensor, lse: Tensor) -> Any:
        got_lse = send(split(lse, 2), groups["2"])
        merged = torch.logsumexp(got_lse, 0)
        total = funcol.all_reduce(merged, "sum", groups["2"])
        got_o = send(split(o + total.sum() * 1e-3, 2), groups["2"])
        out = (torch.exp(got_lse - merged).unsqueeze(-1) * got_o).sum(0)
        return out, total

    return fn


def _returning_lse(
    merged_lse: Callable[[Tensor, Tensor, Tensor], Tensor],
) -> Callable[..., Any]:
    """Also returns something like the merged LSE, of the LSE, its max and the total."""

    def make(groups: dict[str, Any]) -> Callable[..., Any]:
        def fn(o: Tensor, lse: Tensor) -> Any:
            got_o, got_lse = (send(split(x, 2), groups["2"]) for x in (o, lse))
            top = got_lse.amax(0)
            weight = torch.exp(got_lse - top)
            total = weight.sum(0)
            out = (weight.unsqueeze(-1) * got_o).sum(0) / total.unsqueeze(-1)
            return out, merged_lse(got_lse, top, total)

        return fn

    return make


def _constant_scale(scale: float) -> Callable[..., Any]:
    """A tensor of the graph itself, one number a source."""

    def make(groups: dict[str, Any]) -> Callable[..., Any]:
        def fn(o: Tensor, lse: Tensor) -> Any:
            got_o, got_lse = (send(split(x, 2), groups["2"]) for x in (o, lse))
            factor = torch.tensor([1.0, scale])[:, None, None, None]
            return combine(got_o * factor, got_lse)[0]

        return fn

    return make


def _edit_before(target: Any, change: Callable[[torch.fx.Graph, torch.fx.Node], Any]):
    """Edits the graph right before the first node of ``target``."""

    def edit(graph: torch.fx.Graph) -> None:
        node = next(node for node in graph.nodes if node.target is target)
        with graph.inserting_before(node):
            change(graph, node)

    return edit


def _mutate_sent(graph: torch.fx.Graph, node: torch.fx.Node) -> None:
    _call(graph, torch.ops.aten.mul_.Tensor, node.args[0], 0.5)


def _mutate_partial(graph: torch.fx.Graph, node: torch.fx.Node) -> None:
    partial = next(n for n in graph.nodes if n.op == "placeholder")
    _call(graph, torch.ops.aten.mul_.Tensor, partial, 0.5)


def _mutate_received(graph: torch.fx.Graph, node: torch.fx.Node) -> None:
    received = [
        n
        for n in graph.nodes
        if n.target is torch.ops._c10d_functional.wait_tensor.default
    ]
    _call(graph, torch.ops.aten.mul_.Tensor, received[0], 0.5)


def _call(graph: torch.fx.Graph, target: Any, tensor: torch.fx.Node, *args: Any) -> Any:
    node = graph.call_function(target, (tensor, *args))
    node.meta["val"] = tensor.meta["val"]
    return node


def _drop_waits(graph: torch.fx.Graph) -> None:
    for node in [*graph.nodes]:
        if node.target is torch.ops._c10d_functional.wait_tensor.default:
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)


_A2A = torch.ops._c10d_functional.all_to_all_single.default
_AMAX = torch.ops.aten.amax.default


def _plain(groups: dict[str, Any]) -> Callable[..., Any]:
    return _leaking(lambda o, lse: None)(groups)


def _three(rng: torch.Generator, b: int) -> Any:
    return *_partials(rng, b), torch.randn(b, 4, generator=rng)


def _two_pairs(rng: torch.Generator, b: int) -> Any:
    return *_partials(rng, b), *_partials(rng, b)


def _with_batch_of(other: Callable[[int], int]) -> Any:
    return lambda rng, b: (*_partials(rng, b), torch.randn(other(b), 2, generator=rng))


STRUCTURES = [
    Structure(
        "received payload returned",
        "the received buffer is returned",
        _leaking(lambda o, lse: o),
        _partials,
    ),
    Structure(
        "received LSE returned",
        "the received buffer is returned",
        _leaking(lambda o, lse: lse),
        _partials,
    ),
    Structure(
        "received payload summed",
        "the received buffer is also read by",
        _leaking(lambda o, lse: o.sum()),
        _partials,
    ),
    Structure(
        "received LSE read",
        "is also read by",
        _leaking(lambda o, lse: (lse > 0).any()),
        _partials,
    ),
    Structure(
        "merged LSE with an epsilon",
        _NOT,
        _returning_lse(lambda lse, top, total: top + torch.log(total + 1e-3)),
        _partials,
    ),
    Structure(
        "merged LSE in the other base",
        _NOT,
        _returning_lse(lambda lse, top, total: top + torch.log2(total)),
        _partials,
    ),
    Structure(
        "merged LSE without its max",
        _NOT,
        _returning_lse(lambda lse, top, total: torch.log(total)),
        _partials,
    ),
    Structure(
        "mean LSE",
        _NOT,
        _returning_lse(lambda lse, top, total: lse.mean(0)),
        _partials,
    ),
    Structure(
        "merged LSE of -1e30 where all are empty",
        "merged LSE",
        _returning_lse(
            lambda lse, top, total: torch.where(
                top == -torch.inf, -1e30, top + torch.log(total)
            )
        ),
        _partials,
    ),
    Structure("constant scale of 1.001", _NOT, _constant_scale(1.001), _partials),
    Structure("max returned", _NOT, _leaking(lambda o, lse: lse.amax(0)), _partials),
    Structure(
        "weights returned",
        "is also read by",
        _leaking(lambda o, lse: torch.exp(lse - lse.amax(0))),
        _partials,
    ),
    Structure(
        "received packed buffer read",
        "the received buffer is also read by",
        _packed_leak,
        _partials,
    ),
    Structure("two groups", "different groups", _two_groups, _partials),
    Structure("uneven splits", "splits are uneven", _uneven, _partials),
    Structure(
        "heads padded",
        "nothing made from its result alone",
        _padded_heads,
        lambda rng, b: (
            torch.randn(b, 5, 8, generator=rng),
            torch.randn(b, 5, generator=rng),
        ),
    ),
    Structure(
        "expert dispatch",
        "carries 1 tensor",
        _dispatch,
        lambda rng, b: (
            torch.randn(b, 8, generator=rng),
            torch.randn(8, 8, generator=rng),
        ),
    ),
    Structure("three tensors in one", "carries 3 tensor", _three_in_one, _three),
    Structure(
        "three exchanges",
        "nothing made from its result alone",
        _three_exchanges,
        _three,
    ),
    Structure(
        "another layer's LSE",
        "nothing made from its result alone",
        _lse_of_another,
        _two_pairs,
    ),
    Structure("one rank", "one rank", _one_rank, _partials, num_ranks=1),
    Structure(
        "own partial from before", "carries 1 tensor", _own_partial_again, _partials
    ),
    Structure(
        "sink parameter",
        _EITHER,
        _with_sink,
        lambda rng, b: (*_partials(rng, b), torch.randn(2, generator=rng)),
    ),
    Structure("constant sink", _ALL_WEIGHT, _constant_sink, _partials),
    Structure(
        "LSE in bf16",
        "is torch.bfloat16, not fp32",
        _narrow_lse,
        lambda rng, b: (_partials(rng, b)[0], _partials(rng, b)[1].bfloat16()),
    ),
    Structure(
        "LSE in fp64",
        "is torch.float64, not fp32",
        _narrow_lse,
        lambda rng, b: (_partials(rng, b)[0], _partials(rng, b)[1].double()),
    ),
    Structure(
        "payload in fp64",
        "is torch.float64",
        _narrow_lse,
        lambda rng, b: (_partials(rng, b)[0].double(), _partials(rng, b)[1]),
    ),
    Structure("dropout", "carries 1 tensor", _dropout, _partials),
    Structure(
        "one LSE for two layers",
        "the received buffer is also read by",
        _stale_lse,
        lambda rng, b: (*_partials(rng, b), _partials(rng, b)[0]),
    ),
    Structure(
        "merged LSE feeds the payload",
        "inside the merge, is returned",
        _lse_feeds_payload,
        _partials,
    ),
    Structure(
        "sent buffer mutated",
        "mutates a tensor",
        _plain,
        _partials,
        edit=_edit_before(_A2A, _mutate_sent),
    ),
    Structure(
        "partial mutated",
        "mutates a tensor",
        _plain,
        _partials,
        edit=_edit_before(_A2A, _mutate_partial),
    ),
    Structure(
        "received buffer mutated",
        "is also read by mul_",
        _plain,
        _partials,
        edit=_edit_before(_AMAX, _mutate_received),
    ),
    Structure("no wait", "without wait_tensor", _plain, _partials, edit=_drop_waits),
    Structure(
        "factor of another batch",
        "a size that isn't proportional",
        _size_factor(lambda b, t: t // b),
        _with_batch_of(lambda b: 4 if b == 4 else 3 * b),
        dynamic=(0, 1, 2),
    ),
    Structure(
        "factor of a large batch",
        "a size that isn't proportional",
        _size_factor(lambda b: b // 100 + 1),
        _partials,
        dynamic=(0, 1),
    ),
    Structure(
        "factor of the batch",
        "computes with its size",
        _size_factor(lambda b: b),
        _partials,
        dynamic=(0, 1),
    ),
    Structure(
        "factor of an odd batch",
        "a size that isn't proportional",
        _size_factor(lambda b: 2 - b % 2),
        _partials,
        dynamic=(0, 1),
        batch=5,
    ),
    Structure(
        "rows from 6 on",
        "may depend on a row's place",
        _late_rows(6),
        _partials,
        dynamic=(0, 1),
    ),
    Structure(
        "rows from 20 on",
        "may depend on a row's place",
        _late_rows(20),
        _partials,
        dynamic=(0, 1),
    ),
    Structure(
        "rows from 1000 on",
        "may depend on a row's place",
        _late_rows(1000),
        _partials,
        dynamic=(0, 1),
    ),
    Structure(
        "rows from 64 on, sliced",
        "a size that isn't proportional",
        _late_rows_sliced,
        _partials,
        dynamic=(0, 1),
        batch=100,
    ),
    Structure(
        "factor from the host",
        "a size that isn't proportional",
        _item_factor,
        lambda rng, b: (*_partials(rng, b), torch.tensor(200)),
        scalars=True,
    ),
    Structure(
        "batch of two symbols",
        "a size that isn't proportional",
        _batch_of_two,
        _with_batch_of(lambda b: b + 1 if b > 4 else b),
        dynamic=(0, 1, 2),
    ),
    Structure(
        "batch counted by ones",
        "reduces over it",
        _counted_batch,
        _partials,
        dynamic=(0, 1),
    ),
    Structure(
        "rows counted",
        "reduces over it",
        _counted_rows,
        _partials,
        dynamic=(0, 1),
    ),
    Structure(
        "merged LSE reduced between",
        "inside the merge, is also read by all_reduce",
        _reduced_between,
        _partials,
    ),
    Structure(
        "batch padded to 8",
        "a size that isn't proportional",
        _padded_batch,
        _partials,
        dynamic=(0, 1),
        batch=6,
    ),
]
