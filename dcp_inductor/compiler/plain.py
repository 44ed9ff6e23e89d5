"""What no probe can settle: thresholds that arithmetic hides.

NOTE [plain merge]
Probes find a threshold where they meet it, and coverage.py a condition that they never
turned. Neither sees a narrow bump that is made of arithmetic alone: clamps, signs or
tables of ``x * x * x - 16770``. But such a thing needs a number to stand at, and a
merge by LSE needs hardly any: 0, 1, 2, the number of ranks, ln 2 and log2 e,
infinities, at most one tiny epsilon and one huge sentinel. So a region that holds
another number, or rounds data to integers, is refused, after its probes have had their
say. Numbers inside a user kernel are probed (probes.py) and not judged here.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from dcp_inductor.compiler.movement import constant_tensor, is_cast, is_constant
from dcp_inductor.compiler.opaque import is_kernel
from dcp_inductor.compiler.probes import MAX_CONSTANT_NUMEL, numbers
from dcp_inductor.compiler.region import Region
from dcp_inductor.report import Miss

aten = torch.ops.aten

_TINY, _HUGE = 1e-6, 1e20
_ROUNDING: frozenset[Any] = frozenset(
    {
        aten.ceil.default,
        aten.floor.default,
        aten.fmod.Scalar,
        aten.fmod.Tensor,
        aten.remainder.Scalar,
        aten.remainder.Tensor,
        aten.round.decimals,
        aten.round.default,
        aten.sign.default,
        aten.trunc.default,
    }
)


def not_plain(region: Region) -> Miss | None:
    """Why the region may hold a threshold that probes can't find, or None."""
    for node in region.combine:
        if is_constant(node) and _is_long_table(node):
            return Miss(
                f"{node.name} is a table of numbers, which a merge has no use for"
            )
        if _rounds(node):
            return Miss(f"{node.name} rounds data, which a merge has no use for")
    odd = _odd(
        (
            abs(n)
            for node in region.combine
            if not is_kernel(node)
            for n in numbers(node)
        ),
        region.num_ranks,
    )
    if odd is None:
        return None
    return Miss(
        f"it holds the number {odd:.6g}, which a merge has no use for: a threshold "
        "there can't be ruled out by probes"
    )


def _odd(sizes: Iterable[float], num_ranks: int) -> float | None:
    """The first number that a merge doesn't need, such as a second epsilon."""
    needed = (1.0, 2.0, float(num_ranks), math.log(2))
    known = [*needed, *(1 / number for number in needed)]
    ends: dict[bool, float] = {}
    for size in sizes:
        if size == 0 or not math.isfinite(size):
            continue
        if any(math.isclose(size, number, rel_tol=1e-6) for number in known):
            continue
        if _TINY < size < _HUGE:
            return size
        first = ends.setdefault(size >= _HUGE, size)
        if first != size:
            return size
    return None


def _rounds(node: Node) -> bool:
    """True for rounding, and for a cast of floats to integers (bit-casts are views)."""
    if node.target in _ROUNDING:
        return True
    if not is_cast(node):
        return False
    source, result = node.all_input_nodes[0].meta["val"], node.meta["val"]
    return source.dtype.is_floating_point and not (
        result.dtype.is_floating_point or result.dtype == torch.bool
    )


def _is_long_table(node: Node) -> bool:
    if node.op != "get_attr":
        return False
    value: Tensor | None = constant_tensor(node)
    return value is None or value.numel() > MAX_CONSTANT_NUMEL
