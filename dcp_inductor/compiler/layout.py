"""Where heads, tokens and the head dim lie in the region's tensors, as view recipes.

The op takes ``[B, H, D]`` and ``[B, H]`` and gives ``[B, H/N, D]``; a graph may hold
``[H, B, D]``, ``[B, q, H, D]`` or ``[B, H * D]``. This file turns the map that
headmap.py read into reshapes and permutes. A wrong guess here costs a fusion, never a
number: proof.py checks the recipes on random data.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor
from torch.fx import Node

from dcp_inductor.compiler.headmap import Axis, HeadMap
from dcp_inductor.compiler.simulate import Simulation
from dcp_inductor.report import Miss

_MAX_LSE_ORDERS = 6
# Places in an order that aren't axes of the head map: all heads, and their two parts.
_HEADS, _RANKS, _LOCAL = -1, -2, -3


@dataclass(frozen=True)
class SourceDim:
    """The size of axis ``dim`` of partial_o, known when the graph runs."""

    dim: int


Size = int | SourceDim


@dataclass(frozen=True)
class Reshape:
    sizes: tuple[Size, ...]


@dataclass(frozen=True)
class Permute:
    dims: tuple[int, ...]


Recipe = tuple[Reshape | Permute, ...]


@dataclass(frozen=True)
class Layout:
    """Recipes to and from the op: partial_o, partial_lse, then its results back."""

    o_in: Recipe
    lse_in: Recipe
    out: Recipe
    lse_out: Recipe | None


def apply(recipe: Recipe, tensor: Tensor, partial_o: Tensor) -> Tensor:
    """Run a recipe; partial_o resolves SourceDim."""
    for step in recipe:
        if isinstance(step, Permute):
            tensor = tensor.permute(step.dims)
        else:
            tensor = tensor.reshape(
                [
                    partial_o.shape[size.dim] if isinstance(size, SourceDim) else size
                    for size in step.sizes
                ]
            )
    return tensor


def layouts(
    maps: Sequence[HeadMap], simulations: Sequence[Simulation]
) -> Iterator[Layout | Miss]:
    """The layouts that fit the maps of all assignments, one an order of LSE axes."""
    skeleton = _Skeleton(maps, simulations)
    miss = skeleton.check()
    if miss is not None:
        yield miss
        return
    orders = itertools.islice(skeleton.lse_orders(), _MAX_LSE_ORDERS)
    for order in orders:
        yield skeleton.layout(order)


class _Skeleton:
    """Axes of rows in source order: tokens, and all heads (ranks included) as one.

    A size that differs between the assignments is symbolic: -1 in a reshape, or the
    size of an axis of partial_o where two are.
    """

    def __init__(
        self, maps: Sequence[HeadMap], simulations: Sequence[Simulation]
    ) -> None:
        self.maps = maps
        self.simulations = simulations
        first = maps[0]
        self.num_ranks = simulations[0].region.num_ranks
        tokens = [p for p in range(len(first.axes)) if p not in first.heads]
        local = math.prod(first.axes[p].size for p in first.heads)
        self.heads_per_rank = local
        self.num_heads = local * self.num_ranks
        self.head_dim = math.prod(axis.size for axis in first.head_dim)
        head_stride = min(
            [first.rank_stride, *(first.axes[p].stride for p in first.heads)]
        )
        entries = [(first.axes[p].stride, p) for p in tokens]
        entries.append((head_stride, _HEADS))
        self.order = [place for _, place in sorted(entries, reverse=True)]
        self.tokens = [place for place in self.order if place >= 0]

    def check(self) -> Miss | None:
        first, *rest = self.maps
        for other in rest:
            if (
                len(other.axes) != len(first.axes)
                or other.heads != first.heads
                or [axis.dim for axis in other.axes] != [a.dim for a in first.axes]
                or [axis.size for axis in other.head_dim]
                != [axis.size for axis in first.head_dim]
            ):
                return Miss("its layout changes with the batch")
            if any(other.axes[p].size != first.axes[p].size for p in first.heads):
                return Miss("its number of heads is symbolic")
        symbolic = [p for p in self.tokens if self._is_symbolic(p)]
        if len(symbolic) > 1 and any(self._source_dim(p) is None for p in symbolic):
            return Miss("two symbolic token axes can't be told apart")
        return None

    def lse_orders(self) -> Iterator[tuple[int, ...]]:
        """Orders of self.order in partial_lse, likely ones first: as in partial_o, then
        those whose axes end where axes of partial_lse do, then where one of the two
        partials was computed when it was split by rank and the other one wasn't; and of
        all these first those that leave the order of the token axes."""
        split = [(_RANKS, *p) for p in itertools.permutations((*self.tokens, _LOCAL))]
        permuted = [*itertools.permutations(self.order)]
        orders = [tuple(self.order)]
        orders += filter(self._aligns, permuted)
        if self.heads_per_rank > 1:
            orders += filter(self._aligns, split)
        orders += (o for o in permuted if self._aligns(o, inside_heads=True))
        orders.sort(key=lambda order: [p for p in order if p >= 0] != self.tokens)
        yield from dict.fromkeys(orders)

    def layout(self, lse_order: tuple[int, ...]) -> Layout:
        heads_last = [*self.tokens, _HEADS]
        o_split = [self._size(p) for p in self.order]
        o_permute = [self.order.index(p) for p in heads_last]
        heads = [_HEADS] if _HEADS in lse_order else [_RANKS, _LOCAL]
        lse_permute = [lse_order.index(p) for p in (*self.tokens, *heads)]
        num_axes = len(heads_last)
        shapes = [sim.o_shape for sim in self.simulations]
        lse_shapes = [sim.lse_shape for sim in self.simulations]
        batch = self._batch()
        region = self.simulations[0].region
        return Layout(
            o_in=_simplify(
                shapes,
                (*o_split, self.head_dim),
                (*o_permute, num_axes),
                (batch, self.num_heads, self.head_dim),
            ),
            lse_in=_simplify(
                lse_shapes,
                tuple(self._size(p) for p in lse_order),
                tuple(lse_permute),
                (batch, self.num_heads),
            ),
            out=self._out(region.merged, with_head_dim=True),
            lse_out=None
            if region.merged_lse is None
            else self._out(region.merged_lse, with_head_dim=False),
        )

    def _out(self, node: Node, with_head_dim: bool) -> Recipe:
        """From ``[B, H/N(, D)]`` to the shape of ``node``, a result of the region."""
        first = self.maps[0]
        inside = first.head_dim if with_head_dim else ()
        made = [*self.tokens, *first.heads]
        inner = sorted(range(len(inside)), key=lambda place: -inside[place].stride)
        sizes = [self._size(p) for p in self.tokens]
        sizes += [first.axes[p].size for p in first.heads]
        sizes += [inside[p].size for p in inner]
        wanted = self._wanted(inside)
        positions = {("row", p): i for i, p in enumerate(made)}
        positions |= {("in", p): len(made) + i for i, p in enumerate(inner)}
        batch = [
            (math.prod(m.axes[p].size for p in self.tokens), self.heads_per_rank)
            + ((self.head_dim,) if with_head_dim else ())
            for m in self.maps
        ]
        targets = [sim.sizes.sizes(node.meta["val"].shape) for sim in self.simulations]
        return _simplify(
            batch,
            tuple(sizes),
            tuple(positions[key] for key in wanted),
            self._symbolic_shape(targets),
        )

    def _wanted(self, inside: Sequence[Axis]) -> list[tuple[str, int]]:
        """The axes in the order of the result: by its axis, outermost piece first."""
        first = self.maps[0]
        keys = [((axis.dim, 0, p), ("row", p)) for p, axis in enumerate(first.axes)]
        keys += [((axis.dim, 1, p), ("in", p)) for p, axis in enumerate(inside)]
        return [key for _, key in sorted(keys)]

    def _symbolic_shape(self, targets: list[tuple[int, ...]]) -> tuple[Size, ...]:
        varying = [
            dim
            for dim, sizes in enumerate(zip(*targets, strict=True))
            if len({*sizes}) > 1
        ]
        shape: list[Size] = list(targets[0])
        for dim in varying:
            shape[dim] = -1 if len(varying) == 1 else self._dim_of_source(targets, dim)
        return tuple(shape)

    def _dim_of_source(self, targets: list[tuple[int, ...]], dim: int) -> Size:
        sizes = [target[dim] for target in targets]
        for place in range(len(self.simulations[0].o_shape)):
            if [sim.o_shape[place] for sim in self.simulations] == sizes:
                return SourceDim(place)
        return -1

    def _is_symbolic(self, place: int) -> bool:
        return len({m.axes[place].size for m in self.maps}) > 1

    def _source_dim(self, place: int) -> SourceDim | None:
        found = self._dim_of_source([(m.axes[place].size,) for m in self.maps], 0)
        return found if isinstance(found, SourceDim) else None

    def _size(self, place: int) -> Size:
        if place < 0:
            return self._num_heads(place)
        if not self._is_symbolic(place):
            return self.maps[0].axes[place].size
        if sum(map(self._is_symbolic, self.tokens)) == 1:
            return -1
        found = self._source_dim(place)
        assert found is not None, "check() refuses this"
        return found

    def _num_heads(self, place: int) -> int:
        counts = {_RANKS: self.num_ranks, _LOCAL: self.heads_per_rank}
        return counts.get(place, self.num_heads)

    def _batch(self) -> Size:
        if any(map(self._is_symbolic, self.tokens)):
            return -1
        return math.prod(self.maps[0].axes[p].size for p in self.tokens)

    def _aligns(self, order: tuple[int, ...], inside_heads: bool = False) -> bool:
        """inside_heads: also where an axis of partial_lse is cut at the ranks."""
        for m, sim in zip(self.maps, self.simulations, strict=True):
            sizes = [self._num_heads(p) if p < 0 else m.axes[p].size for p in order]
            ends = {*itertools.accumulate(sizes, int.__mul__)}
            allowed = {*itertools.accumulate(sim.lse_shape, int.__mul__)}
            if inside_heads:
                allowed |= {end * self.num_ranks for end in (1, *allowed)}
            if not ends <= allowed:
                return False
        return True


def _simplify(
    start: Sequence[tuple[int, ...]],
    split: tuple[Size, ...],
    dims: tuple[int, ...],
    end: tuple[Size, ...],
) -> Recipe:
    """reshape(split), permute(dims), reshape(end), less what does nothing.

    start: the shape before, under each assignment; an axis whose size differs between
    them can only be left where the reshape leaves it.
    """
    steps: list[Reshape | Permute] = []
    if dims == tuple(range(len(dims))):
        steps.append(Reshape(end))
    else:
        if not _same_shape(start, split):
            steps.append(Reshape(split))
        steps.append(Permute(dims))
        if end != tuple(split[dim] for dim in dims):
            steps.append(Reshape(end))
        return tuple(steps)
    return () if _same_shape(start, end) else tuple(steps)


def _same_shape(shapes: Sequence[tuple[int, ...]], sizes: tuple[Size, ...]) -> bool:
    if len(shapes[0]) != len(sizes):
        return False
    for dim, size in enumerate(sizes):
        values = {shape[dim] for shape in shapes}
        if isinstance(size, SourceDim):
            continue
        if size == -1:
            if len(shapes) > 1 and len(values) == 1:
                return False
        elif values != {size}:
            return False
    return True
