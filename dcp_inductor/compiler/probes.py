"""The data that a proof runs a region on. What it should give is proof.py's.

NOTE [probes]
A row is one (token, head) of all ranks. Each gets a pattern of LSEs over the ranks,
drawn for it alone; a run deals the patterns to rows in turn, and the runs shift the
deal, so that a row meets many of them, and a pattern many rows. Which rank has the
largest LSE, which the next, is dealt too: of few ranks every order comes up, since a
merge that takes two at a time may be wrong in one of them alone. Payloads come in two
kinds, both in the first runs, by turns in later ones:
- columns: rank r holds 1 in the columns d = r mod N and 0 elsewhere, so that each
  element of the result is one rank's weight by itself, to be judged relative to that
  weight, however small: a temperature, a clamp or an epsilon that a sum would hide
  shows.
- random: every element of every rank counts, in its place; in sizes from 2**-40 to
  2**40 (as the dtype allows), some rows all zero.

NOTE [the graph's constants]
Between thresholds a merge is made of exp, log, products, sums and max, which random
data settle. A threshold stands in the graph as a number. So LSEs, gaps and payloads
near each number of the region (and its logarithms, reciprocal and negative) are probed
too, mixed and alone, since a condition may look at the whole batch.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from dcp_inductor.compiler.movement import constant_tensor, takes_a_number
from dcp_inductor.compiler.opaque import is_kernel
from dcp_inductor.compiler.opaque import numbers as numbers_of_kernel
from dcp_inductor.compiler.region import Region

_SEED = 20240229
# A proof's mixed runs stop being added at this many payload elements of all ranks.
_BUDGET_ELEMENTS = 2**21
# Runs go on until each pattern met so many rows; fewer where user kernels run, maybe
# interpreted.
_ROWS_OF_EACH = 24
_ROWS_OF_KERNELS = 6
# Ranks whose orders are dealt; of more they are drawn.
_MAX_DEALT_RANKS = 4
_MAX_CONSTANTS = 12
# Elements of a constant tensor that are looked at one by one.
MAX_CONSTANT_NUMEL = 64
_TRIVIAL = (0.0, 1.0, math.log(2), math.log2(math.e))

# Sizes of random payloads, within what the dtype holds to full precision.
_WIDE_SIZES = (1.0, 2.0**40, 2.0**12, 2.0**-12, 2.0**-40)
_PAYLOAD_SIZES = {
    torch.float32: _WIDE_SIZES,
    torch.bfloat16: _WIDE_SIZES,
    torch.float16: (1.0, 2.0**10, 2.0**5, 2.0**-5),
    torch.float8_e4m3fn: (1.0, 2.0**5),
    torch.float8_e5m2: (1.0, 2.0**10),
}


@dataclass(frozen=True)
class Rows:
    """What a pattern is drawn for: ``num_rows`` rows on ``num_ranks`` ranks.

    order ``[N, rows]``: 0 .. N - 1 on the ranks of each row.
    """

    num_ranks: int
    num_rows: int
    rng: torch.Generator
    order: Tensor

    @property
    def shape(self) -> tuple[int, int]:
        return self.num_ranks, self.num_rows

    def uniform(self, *shape: int) -> Tensor:
        """In ``[0, 1)``; one an LSE, unless of ``shape``."""
        return torch.rand(shape or self.shape, generator=self.rng)

    def integers(self, low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape or self.shape, generator=self.rng)


Pattern = Callable[[Rows], Tensor]


@dataclass(frozen=True)
class Probe:
    """One run: payload ``[N, rows, D]`` fp32 and LSE ``[N, rows]`` fp32.

    kind ``[rows]``: the index in names of each row's pattern. every_receiver: look at
    what all ranks get, not at a few.
    """

    payload: Tensor
    lse: Tensor
    kind: Tensor
    names: tuple[str, ...]
    every_receiver: bool = False


def _random(rows: Rows) -> Tensor:
    return rows.uniform() * 8 - 4


def _equal(rows: Rows) -> Tensor:
    return (rows.uniform(1, rows.num_rows) * 8 - 4).expand(rows.shape)


def _whole(rows: Rows) -> Tensor:
    return rows.integers(-3, 4).float()


def _gaps(gap: float) -> Pattern:
    return lambda rows: rows.uniform(rows.num_rows) - rows.order * gap


def _around(center: float) -> Pattern:
    return lambda rows: center + _random(rows)


def _one_at(distance: float) -> Pattern:
    """One rank ``distance`` from the others."""
    return lambda rows: _random(rows) + torch.where(rows.order == 0, distance, 0.0)


def _any_size(rows: Rows) -> Tensor:
    """Centers of 1 to 1e6, both signs, gaps of 1e-3 to 300: log-uniform."""
    center = 10 ** (rows.uniform(rows.num_rows) * 6)
    sign = rows.integers(0, 2, rows.num_rows) * 2 - 1
    gap = 10 ** (rows.uniform(rows.num_rows) * 5.5 - 3)
    return sign * center - rows.order * gap


def _with_empty(num_empty: Callable[[int], int]) -> Pattern:
    """Random LSEs with -inf on some ranks."""

    def pattern(rows: Rows) -> Tensor:
        empty = rows.order < num_empty(rows.num_ranks)
        return torch.where(empty, -torch.inf, _random(rows))

    return pattern


def _near(values: Sequence[float]) -> Pattern:
    """Each row near one of ``values``, or its ranks near different ones: a few per cent
    off, exactly there, or within 4, on all ranks or on some."""

    def pattern(rows: Rows) -> Tensor:
        choice = rows.integers(0, len(values))
        apart = rows.uniform(rows.num_rows) < 0.3
        center = torch.tensor(values)[torch.where(apart, choice, choice[0])]
        noise = torch.randn(rows.shape, generator=rows.rng)
        near = torch.stack(
            [
                center * (1 + 0.05 * noise),
                center,
                center + 0.01 * noise,
                center + 2 * noise,
            ]
        ).gather(0, rows.integers(0, 4).unsqueeze(0))[0]
        some = rows.uniform() < 0.5
        whole_row = rows.uniform(rows.num_rows) < 0.7
        return torch.where(some | whole_row, near, _random(rows))

    return pattern


def _above(value: float) -> Pattern:
    """All ranks of all rows a little above ``value``: what a condition on a whole
    batch would see."""

    def pattern(rows: Rows) -> Tensor:
        step = rows.uniform() * 4 + 0.01
        return value + step * max(1.0, abs(value) / 2**20)

    return pattern


def _below(value: float) -> Pattern:
    above = _above(-value)
    return lambda rows: -above(rows)


def _opposed(value: float) -> Pattern:
    """Each rank beyond ``value`` on a side of its own."""
    beyond = _above(abs(value))
    return lambda rows: (rows.integers(0, 2) * 2 - 1) * beyond(rows)


def _gaps_near(values: Sequence[float]) -> Pattern:
    def pattern(rows: Rows) -> Tensor:
        choice = rows.integers(0, len(values), rows.num_rows)
        gap = torch.tensor(values)[choice].abs()
        gap = gap * (0.8 + 0.4 * rows.uniform(rows.num_rows))
        return rows.uniform(rows.num_rows) - rows.order * gap

    return pattern


_LEVELS = (40, -40, 150, -150, 400, -400, 1000, -1000, 5000, -5000)
ORDINARY = "ordinary LSEs"
PATTERNS: dict[str, Pattern] = {
    ORDINARY: _random,
    "equal LSEs": _equal,
    "whole LSEs": _whole,
    "LSEs 0.01 apart": _gaps(0.01),
    "LSEs 0.1 apart": _gaps(0.1),
    "LSEs 1 apart": _gaps(1.0),
    "LSEs 8 apart": _gaps(8.0),
    "LSEs 20 apart": _gaps(20.0),
    "LSEs 60 apart": _gaps(60.0),
    "LSEs 150 apart": _gaps(150.0),
    "one LSE 150 above": _one_at(150.0),
    "one LSE 150 below": _one_at(-150.0),
    **{f"LSEs near {level}": _around(level) for level in _LEVELS},
    "LSEs of any size": _any_size,
    "one empty shard": _with_empty(lambda num_ranks: 1),
    "all but one shard empty": _with_empty(lambda num_ranks: num_ranks - 1),
    "all shards empty": _with_empty(lambda num_ranks: num_ranks),
}
# Large regions have few runs; a row that is treated apart must still meet these.
_FOR_EVERY_ROW = ("one empty shard", "LSEs of any size")
# On these, a merge that means anything is finite.
MUST_BE_FINITE = (ORDINARY, "equal LSEs", "LSEs 0.1 apart", "LSEs 1 apart")


class Prober:
    """Makes the probes of one region: N ranks, ``num_rows`` rows of ``head_dim``."""

    def __init__(self, region: Region, num_rows: int, head_dim: int) -> None:
        self.num_ranks = region.num_ranks
        self.num_rows = num_rows
        self.head_dim = head_dim
        self.dtype: torch.dtype = region.partial_o.meta["val"].dtype
        self.constants = graph_constants(region)
        self.has_kernels = any(map(is_kernel, (*region.pack, *region.combine)))
        self.patterns = dict(PATTERNS)
        if self.constants:
            self.patterns["LSEs near the graph's constants"] = _near(self.constants)
            self.patterns["LSEs as far apart as the graph's constants"] = _gaps_near(
                self.constants
            )

    def ordinary(self) -> Iterator[Probe]:
        """What settles the base, looked at on every rank."""
        yield from self._probes({ORDINARY: _random}, 0, every_receiver=True)

    def all(self) -> Iterator[Probe]:
        """Every pattern: dealt to the rows, then some alone, met by every row."""
        for shift in range(self._num_runs()):
            yield from self._probes(self.patterns, shift)
        for place, name in enumerate(_FOR_EVERY_ROW):
            yield from self._probes({name: PATTERNS[name]}, 500 + place)
        for place, value in enumerate(self.constants):
            name = f"LSEs near {value:.4g}, a constant of the graph"
            sides = (_near([value]), _above(value), _below(value), _opposed(value))
            for side, pattern in enumerate(sides):
                yield from self._probes({name: pattern}, 1000 + 4 * place + side)

    def _num_runs(self) -> int:
        elements = self.num_ranks * self.num_rows * self.head_dim
        most = _BUDGET_ELEMENTS // elements
        num_patterns = len(self.patterns)
        if self.has_kernels:
            most = min(num_patterns, self._runs_to_meet(_ROWS_OF_KERNELS))
        enough = max(num_patterns, self._runs_to_meet(_ROWS_OF_EACH))
        return max(2, min(enough, most))

    def _runs_to_meet(self, rows_of_each: int) -> int:
        return math.ceil(rows_of_each * len(self.patterns) / self.num_rows)

    def _probes(
        self, patterns: dict[str, Pattern], shift: int, every_receiver: bool = False
    ) -> Iterator[Probe]:
        rng = torch.Generator().manual_seed(_SEED + shift)
        kind = (torch.arange(self.num_rows) + shift) % len(patterns)
        # A row takes the next order with each pattern, and a pattern with each row.
        met = torch.arange(self.num_rows) + shift // len(patterns) * self.num_rows
        order = self._order(met + kind, rng)
        rows = Rows(self.num_ranks, self.num_rows, rng, order)
        lse = torch.empty(rows.shape)
        drawn = {*kind.tolist()}
        for place, pattern in enumerate(patterns.values()):
            if place in drawn:
                lse = torch.where(kind == place, pattern(rows), lse)
        if shift < 2 or shift % 2:
            yield Probe(
                self._columns(shift), lse, kind, tuple(patterns), every_receiver
            )
        if shift < 2 or shift % 2 == 0:
            payload = self._random_payload(shift, rng, plain=every_receiver)
            yield Probe(payload, lse, kind, tuple(patterns), every_receiver)

    def _order(self, number: Tensor, rng: torch.Generator) -> Tensor:
        """``[N, rows]``: the orders of the ranks with these numbers; of many, any."""
        n = self.num_ranks
        if n > _MAX_DEALT_RANKS:
            return torch.rand(n, self.num_rows, generator=rng).argsort(0).float()
        orders = torch.tensor([*itertools.permutations(range(n))])
        return orders[number % len(orders)].T.float()

    def _columns(self, shift: int) -> Tensor:
        """Rank r: 1 in the columns r mod N. Of few columns, other ranks' each run."""
        rank = torch.arange(self.num_ranks).reshape(-1, 1, 1)
        column = torch.arange(self.head_dim) + shift * self.head_dim
        ones = (column % self.num_ranks == rank).float()
        return ones.expand(-1, self.num_rows, -1)

    def _random_payload(self, shift: int, rng: torch.Generator, plain: bool) -> Tensor:
        shape = (self.num_ranks, self.num_rows, self.head_dim)
        payload = torch.randn(shape, generator=rng)
        if plain:
            return payload
        largest = torch.finfo(self.dtype).max / 16
        near = [abs(c) for c in self.constants if 1e-12 < abs(c) < min(largest, 1e12)]
        sizes = torch.tensor([*_PAYLOAD_SIZES[self.dtype], *near])
        rows = torch.arange(self.num_rows)
        place = (rows + rows // len(self.patterns) + shift) % len(sizes)
        empty = torch.rand(shape[:2], generator=rng) < 0.1
        payload = payload * sizes[place].unsqueeze(-1)
        if near:
            exact = torch.tensor(near)[torch.randint(len(near), shape, generator=rng)]
            payload = torch.where(
                torch.rand(shape, generator=rng) < 0.2, exact * payload.sign(), payload
            )
        return torch.where(empty.unsqueeze(-1), 0.0, payload)


def graph_constants(region: Region) -> tuple[float, ...]:
    """The numbers of a region that aren't sizes, with what they may be in an LSE."""
    found: dict[float, None] = {}
    for node in (*region.pack, *region.combine):
        for number in numbers(node):
            if math.isfinite(number) and abs(number) not in _TRIVIAL:
                found[number] = None
    near: dict[float, None] = {}
    for number in [*found][:_MAX_CONSTANTS]:
        size = abs(number)
        roots = math.sqrt(size), -math.sqrt(size)
        logs = math.log(size), math.log2(size)
        for value in (number, -number, 1 / number, *roots, *logs):
            if abs(value) < 3e38:
                near[value] = None
    return tuple(near)


def numbers(node: Node) -> list[float]:
    """The numbers that a node computes with: not sizes, axes or dtypes."""
    if is_kernel(node):
        return numbers_of_kernel(node)
    if node.op == "get_attr":
        tensor = constant_tensor(node)
        if tensor is None or tensor.numel() > MAX_CONSTANT_NUMEL or tensor.is_complex():
            return []
        return [float(value) for value in tensor.flatten().tolist()]
    if not isinstance(node.target, torch._ops.OpOverload):
        return []
    parameters = node.target._schema.arguments
    given: list[Any] = [v for _, v in zip(parameters, node.args, strict=False)]
    by_name = {parameter.name: parameter for parameter in parameters}
    pairs = [*zip(parameters, given, strict=False)]
    pairs += [(by_name[name], value) for name, value in node.kwargs.items()]
    return [
        float(value)
        for parameter, value in pairs
        if takes_a_number(parameter)
        and isinstance(value, (int, float))
        and not isinstance(value, bool)
    ]
