"""Whether a region does to every batch size what it does to the sizes of a proof.

NOTE [uniform]
A dynamic region is run at two batch sizes, and fused for all. That is sound only if
nothing in it looks at how large the batch is, or where in the batch a row lies:
- sizes are products of symbols, sums of one symbol's, and exact quotients: no mod, min
  or max, and no difference of two batches;
- a size feeds shapes, never numbers;
- ops are pointwise, reductions of other axes, products or movement; an op that makes
  positions (iota, cumsum, sort), picks rows by a constant (``x[100:]``) or counts them
  isn't among them.
A static region needs none of this: its proof ran at its one size.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any

import sympy
import torch
from torch.fx import Node
from torch.utils._sympy.functions import FloorDiv, Mod

from dcp_inductor.compiler.movement import (
    is_cast,
    is_constant,
    is_mover,
    is_size,
    takes_a_number,
)
from dcp_inductor.compiler.opaque import is_kernel, is_opaque, looks_at_place
from dcp_inductor.compiler.region import Region
from dcp_inductor.report import Miss

aten = torch.ops.aten

_EVERYWHERE_ALIKE: frozenset[Any] = frozenset(
    {
        aten.amax.default,
        aten.amin.default,
        aten.any.default,
        aten.any.dim,
        aten.any.dims,
        aten.bmm.default,
        aten.max.dim,
        aten.mean.dim,
        aten.min.dim,
        aten.mm.default,
        aten.prod.dim_int,
        aten.repeat.default,
        aten.sum.default,
        aten.sum.dim_IntList,
        operator.getitem,
    }
)
_PICKS_BY_PLACE = {
    aten.slice.Tensor: ("start", "end"),
    aten.slice_scatter.default: ("start", "end"),
    aten.select.int: ("index",),
    aten.select_scatter.default: ("index",),
    aten.split.Tensor: ("split_size",),
    aten.split_with_sizes.default: ("split_sizes",),
    aten.unbind.int: (),
}
_NEVER_ON_A_SYMBOLIC_AXIS = frozenset(
    {
        aten.constant_pad_nd.default,
        aten.flip.default,
        aten.max.dim,
        aten.min.dim,
        aten.roll.default,
        aten.unbind.int,
    }
)
_MAKES_POSITIONS = (
    torch.ops.prims.iota.default,
    aten.arange.default,
    aten.arange.start,
    aten.arange.start_step,
)
_BY_PLACE = {*_PICKS_BY_PLACE, *_NEVER_ON_A_SYMBOLIC_AXIS, aten.cat.default}
_TO_THE_END = 2**62


def not_uniform(region: Region) -> Miss | None:
    """Why the region may do something else at another batch size, or None."""
    nodes = [*region.pack, *region.combine]
    if not any(_symbolic(node.meta.get("val")) for node in nodes):
        return None
    for node in nodes:
        reason = _node(node)
        if reason is not None:
            return Miss(f"the batch is dynamic, and {node.name} {reason}")
    return None


def _node(node: Node) -> str | None:
    if any(not _plain(size) for size in _symbolic(node.meta.get("val"))):
        return "has a size that isn't proportional to it"
    if node.op != "call_function" or is_size(node):
        return None
    if is_opaque(node):
        return looks_at_place(node) if is_kernel(node) else None
    if not _known(node):
        return f"({node.target}) may depend on a row's place in it"
    if any(_reads_size_as_number(node)):
        return "computes with its size"
    if not is_mover(node) and _loses_a_symbolic_axis(node):
        return "reduces over it"
    return _picks_rows(node)


def _known(node: Node) -> bool:
    if node.target in _EVERYWHERE_ALIKE or is_mover(node) or is_cast(node):
        return True
    tags = getattr(node.target, "tags", ())
    if torch.Tag.pointwise in tags:
        return True
    return is_constant(node) and not (
        node.target in _MAKES_POSITIONS and any(map(is_size, node.all_input_nodes))
    )


def _loses_a_symbolic_axis(node: Node) -> bool:
    """True if rows of a symbolic axis are summed (or the like) into one number."""
    kept = {size.node.expr for size in _symbolic(node.meta["val"])}
    return any(
        size.node.expr not in kept
        for source in node.all_input_nodes
        if not is_size(source)
        for size in _symbolic(source.meta["val"])
    )


def _reads_size_as_number(node: Node) -> Iterator[bool]:
    """True for each argument that takes a number and gets a size."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return
    parameters = node.target._schema.arguments
    for place, value in enumerate(node.args):
        yield _is_size_value(value) and takes_a_number(parameters[place])
    by_name = {parameter.name: parameter for parameter in parameters}
    for name, value in node.kwargs.items():
        yield _is_size_value(value) and takes_a_number(by_name[name])


def _is_size_value(value: Any) -> bool:
    if isinstance(value, Node):
        return is_size(value) and isinstance(value.meta["val"], torch.SymInt)
    return isinstance(value, torch.SymInt)


def _picks_rows(node: Node) -> str | None:
    """A reason if the node treats rows of a symbolic axis by a constant place."""
    target: Any = node.target
    if target not in _BY_PLACE:
        return None
    arguments = _bound(node)
    shapes = [t.meta["val"].shape for t in node.all_input_nodes if not is_size(t)]
    symbolic = [
        any(isinstance(shape[axis], torch.SymInt) for axis in _axes(node, arguments))
        for shape in shapes[: None if target is aten.cat.default else 1]
        if shape
    ]
    if not any(symbolic):
        return None
    if target in _NEVER_ON_A_SYMBOLIC_AXIS or not all(symbolic):
        return "moves rows along it"
    if target is aten.cat.default:
        return None
    for name in _PICKS_BY_PLACE[target]:
        value = arguments.get(name)
        values = value if isinstance(value, (list, tuple)) else [value]
        if any(isinstance(v, int) and 0 != v < _TO_THE_END for v in values):
            return "picks rows of it by a constant"
    return None


def _axes(node: Node, arguments: dict[str, Any]) -> list[int]:
    """The axes along which a movement op moves."""
    if node.target is aten.constant_pad_nd.default:
        return [-1 - axis for axis in range(len(arguments["pad"]) // 2)]
    dims = arguments.get("dim", arguments.get("dims", 0))
    return [*dims] if isinstance(dims, (list, tuple)) else [dims]


def _bound(node: Node) -> dict[str, Any]:
    """The call's arguments by name, defaults left out."""
    parameters = node.target._schema.arguments  # type: ignore[union-attr]
    named = {p.name: v for p, v in zip(parameters, node.args, strict=False)}
    return {**named, **node.kwargs}


def _symbolic(value: Any) -> list[torch.SymInt]:
    """The symbolic sizes of a tensor's shape, or of a size."""
    if isinstance(value, torch.SymInt):
        return [value]
    if isinstance(value, torch.Tensor):
        shape: tuple[Any, ...] = tuple(value.shape)
        return [size for size in shape if isinstance(size, torch.SymInt)]
    if isinstance(value, (list, tuple)):
        return [size for item in value for size in _symbolic(item)]
    return []


def _plain(size: torch.SymInt) -> bool:
    """True for integers, symbols, sums, products and quotients known to be exact."""
    for part in sympy.preorder_traversal(size.node.expr):
        if isinstance(part, FloorDiv):
            if not _divides(size, *part.args):
                return False
        elif isinstance(part, sympy.Add):
            if len(part.free_symbols) > 1:
                return False
        elif not isinstance(part, (sympy.Integer, sympy.Symbol, sympy.Mul)):
            return False
    return True


def _divides(size: torch.SymInt, base: sympy.Expr, divisor: sympy.Expr) -> bool:
    shape_env: Any = size.node.shape_env
    known = shape_env._maybe_evaluate_static(sympy.Eq(Mod(base, divisor), 0))
    return known is not None and bool(known)
