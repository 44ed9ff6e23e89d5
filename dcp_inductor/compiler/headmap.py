"""Reads from a simulation which elements of partial_o each rank's result is made of.

What is made of the map is layout.py's.

NOTE [reading the head map]
With all the weight on rank 0 the result is rank 0's partial, moved. Giving element i
the digits of i, one probe a digit, as integers that the dtype holds exactly, reads off
``source(p, k)``: the flat index in partial_o of element k of receiver p's result. For
an exchange of head slices this is affine in the result's axes and in p:

    source(p, k) = p * P + sum_axis(k_axis * stride_axis)

Axes of stride < D are the head dim. Dividing by D gives rows; the rank's stride P tells
which axes are heads: the ones that follow the rank axis directly (head h on rank
``h // (H/N)``). The rest are tokens.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dcp_inductor.compiler.movement import mantissa_bits
from dcp_inductor.compiler.simulate import Simulation
from dcp_inductor.report import Miss

# Outweighs every other rank in both bases: 2 ** -10000 is 0 in fp32.
_ALL_WEIGHT = 1.0e4


@dataclass(frozen=True)
class Axis:
    """``size`` steps of ``stride`` elements of partial_o, in axis ``dim`` of the
    result."""

    size: int
    stride: int
    dim: int


@dataclass(frozen=True)
class HeadMap:
    """The affine map of NOTE [reading the head map], in rows of D elements.

    axes: the row axes of the result, in its order. head_dim: the axes inside a row.
    rank_stride: P / D. heads: which of axes are local heads, outermost first.
    """

    axes: tuple[Axis, ...]
    head_dim: tuple[Axis, ...]
    rank_stride: int
    heads: tuple[int, ...]


def read_head_map(simulation: Simulation) -> HeadMap | Miss:
    """Read the map off probes of one simulation."""
    source = _source_index(simulation)
    if isinstance(source, Miss):
        return source
    steps = source[1:] - source[:-1]
    rank_stride = int(steps[0, 0])
    if not bool((steps == rank_stride).all()) or rank_stride <= 0 or source[0, 0]:
        return Miss(
            "the heads that a rank gets don't go up with its rank: the ranks or heads "
            "are permuted"
        )
    shape = _merged_shape(simulation)
    axes = _affine_axes(source[0].reshape(shape))
    if axes is None:
        return Miss("the merged result isn't a regular slice of the partial output")
    head_dim = math.prod(simulation.o_shape) // math.prod(simulation.lse_shape)
    split = _split_head_dim(axes, head_dim)
    if split is None or rank_stride % head_dim:
        return Miss(
            "an LSE doesn't belong to contiguous elements of the partial output"
        )
    return _with_heads(*split, rank_stride // head_dim, simulation)


def _source_index(simulation: Simulation) -> Tensor | Miss:
    """``source[p, k]`` for all receivers p, read in digits."""
    num_ranks = simulation.region.num_ranks
    dtype = simulation.region.partial_o.meta["val"].dtype
    numel = math.prod(simulation.o_shape)
    base = 2 ** mantissa_bits(dtype)
    lse = torch.full((num_ranks, *simulation.lse_shape), -_ALL_WEIGHT)
    lse[0] = 0.0
    index = torch.arange(numel)
    source: Tensor | None = None
    place = 1
    while place < max(numel, 2):
        partial_o = torch.zeros((num_ranks, numel))
        partial_o[0] = index // place % base
        outcomes = simulation.run(
            partial_o.reshape(num_ranks, *simulation.o_shape).to(dtype),
            lse,
            range(num_ranks),
        )
        read = torch.stack([outcome.merged.flatten() for outcome in outcomes])
        digit = read.round()
        if not bool(((read - digit).abs() < 1e-3).all()):
            return Miss(
                "it isn't a merge by LSE: with all weight on one rank the result isn't "
                "that rank's partial output"
            )
        source = digit.long() * place + (0 if source is None else source)
        place *= base
    assert source is not None
    return source


def _merged_shape(simulation: Simulation) -> tuple[int, ...]:
    return simulation.sizes.sizes(simulation.region.merged.meta["val"].shape)


def _affine_axes(index: Tensor) -> list[Axis] | None:
    """The axes of an index that is a sum of one multiple an axis; None if it isn't."""
    axes: list[Axis] = []
    for dim in range(index.dim()):
        line = index[(0,) * dim + (slice(None),) + (0,) * (index.dim() - dim - 1)]
        axes += [Axis(n, s, dim) for n, s in _split_line(line.tolist())]
    total = torch.zeros((), dtype=torch.long)
    for axis in axes:
        step = torch.arange(axis.size) * axis.stride
        total = (total.unsqueeze(-1) + step).flatten() if total.dim() else step
    return axes if torch.equal(total.reshape(index.shape), index) else None


def _split_line(line: Sequence[int]) -> list[tuple[int, int]]:
    """(size, stride) pieces of an axis, outermost first: [0 1 6 7]: (2, 6) (2, 1)."""
    if len(line) == 1:
        return []
    stride = line[1]
    run = 1
    while run < len(line) and line[run] == run * stride:
        run += 1
    if len(line) % run:
        return [(len(line), stride)]
    return [*_split_line(line[::run]), (run, stride)]


def _split_head_dim(
    axes: list[Axis], head_dim: int
) -> tuple[list[Axis], list[Axis]] | None:
    """(row axes with strides in rows, axes inside a row), cutting one that has both."""
    rows: list[Axis] = []
    inside: list[Axis] = []
    for axis in axes:
        if axis.stride >= head_dim:
            if axis.stride % head_dim:
                return None
            rows.append(Axis(axis.size, axis.stride // head_dim, axis.dim))
        elif axis.size * axis.stride <= head_dim:
            inside.append(axis)
        elif head_dim % axis.stride == 0 and axis.size % (head_dim // axis.stride) == 0:
            length = head_dim // axis.stride
            rows.append(Axis(axis.size // length, 1, axis.dim))
            inside.append(Axis(length, axis.stride, axis.dim))
        else:
            return None
    if math.prod(axis.size for axis in inside) != head_dim:
        return None
    return rows, inside


def _with_heads(
    rows: list[Axis], inside: list[Axis], rank_stride: int, simulation: Simulation
) -> HeadMap | Miss:
    num_ranks = simulation.region.num_ranks
    head_dim = math.prod(axis.size for axis in inside)
    size, stride = _source_axis(simulation.o_shape, head_dim, rank_stride)
    heads = _head_chain(rows, rank_stride, stride)
    lse_size, lse_stride = _source_axis(simulation.lse_shape, 1, rank_stride)
    outermost = rank_stride * num_ranks in (size * stride, lse_size * lse_stride)
    if not outermost and not heads:
        return Miss(
            f"heads are interleaved: rank r gets the heads r, r + {num_ranks}, .. and "
            "not a contiguous slice"
        )
    pieces = sorted(
        [(axis.stride, axis.size) for axis in rows] + [(rank_stride, num_ranks)]
    )
    reached = 1
    for step, length in pieces:
        if step != reached:
            return Miss("some heads are dropped or sent twice")
        reached *= length
    if reached != math.prod(simulation.lse_shape):
        return Miss("some heads are dropped or sent twice")
    return HeadMap(tuple(rows), tuple(inside), rank_stride, tuple(heads))


def _source_axis(
    o_shape: tuple[int, ...], head_dim: int, rank_stride: int
) -> tuple[int, int]:
    """(size, stride) in rows of the axis of partial_o that the rank axis lies in."""
    stride = 1
    for size in reversed(o_shape):
        if head_dim > 1:
            inside = math.gcd(size, head_dim)
            head_dim //= inside
            size //= inside
        if stride * size > rank_stride or (size > 1 and stride == rank_stride):
            return size, stride
        stride *= size
    return stride, 1


def _head_chain(rows: list[Axis], rank_stride: int, lowest: int) -> list[int]:
    """Indices of the axes that follow the rank axis directly, down to ``lowest``.

    Where tokens lie outside the rank axis, axes further in are taken along: merged
    with the heads they need no copy, as tokens they would.
    """
    tokens_outside = any(axis.stride > rank_stride for axis in rows)
    chain: list[int] = []
    below = rank_stride
    while True:
        for place, axis in enumerate(rows):
            follows = axis.size * axis.stride == below and axis.stride < below
            if follows and (axis.stride >= lowest or tokens_outside):
                chain.append(place)
                below = axis.stride
                break
        else:
            return chain
