"""Whether a program looks for NaN behind a merge.

NOTE [looks for NaN]
A merge without a guard makes NaN of a row whose shards are all empty, one without a
maximum also of a large LSE; the op makes the merge. A program that computes on with
such a NaN has no result of worth there, and a fused one may have another. A program
that asks for NaN has one: `where(isnan(y), 0, y)`, however far behind the merge. So
where a region made NaN or infinity of probes that have a merge (Proof.finite), it is
refused if its results reach such a question. Where the question itself is inside the
region, it is part of what was proved.

A question is an op that is there to ask: isnan, isinf, `x == x`, a comparison with
infinity. That others let NaN end too (`x > 0`, argmax, a cast to int) is no question:
routers and quantizers do so on whatever is behind a merge. What leaves the graph, or
enters a kernel, isn't followed.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch.fx import GraphModule, Node

from dcp_inductor.compiler.movement import constant_tensor
from dcp_inductor.compiler.probes import numbers

aten = torch.ops.aten

# Decompositions make of isfinite, nan_to_num, nansum and more what is here; without
# them some stand in the graph by name.
_QUESTIONS: frozenset[Any] = frozenset(
    {
        aten.isnan.default,
        aten.isinf.default,
        aten.isfinite.default,
        aten.isposinf.default,
        aten.isneginf.default,
        aten.nan_to_num.default,
        aten.nansum.default,
        aten.nanmedian.default,
        aten.nanmedian.dim,
        aten.fmax.default,
        aten.fmin.default,
    }
)
_COMPARISONS: frozenset[Any] = frozenset(
    getattr(getattr(aten, name), overload)
    for name in ("eq", "ne", "lt", "le", "gt", "ge")
    for overload in ("Scalar", "Tensor")
)
# What a tensor's bits are read through, all of them.
_WHOLE: frozenset[Any] = frozenset(
    {
        aten.alias.default,
        aten.clone.default,
        aten.detach.default,
        aten.expand.default,
        aten.lift_fresh_copy.default,
        aten.reshape.default,
        aten.squeeze.default,
        aten.squeeze.dim,
        aten.squeeze.dims,
        aten.unsqueeze.default,
        aten.view.default,
        aten._unsafe_view.default,
    }
)


def asks_for_nan(node: Node) -> bool:
    """True for an op that is there to tell NaN or infinity from numbers."""
    if node.target in _QUESTIONS:
        return True
    if node.target in _COMPARISONS:
        sides = [_origin(side) for side in node.all_input_nodes]
        with_itself = len({*sides}) == 1 and all(isinstance(a, Node) for a in node.args)
        return with_itself or any(map(_holds_infinity, (node, *sides)))
    return any(map(_asks_inside, node.all_input_nodes))


def question_behind(ends: Iterable[Node | None]) -> Node | None:
    """The first op found that asks for NaN in what ``ends`` reach, or None."""
    waiting = [user for end in ends if end is not None for user in end.users]
    seen = {*waiting}
    while waiting:
        node = waiting.pop()
        if asks_for_nan(node):
            return node
        fresh = [user for user in node.users if user not in seen]
        seen.update(fresh)
        waiting += fresh
    return None


def _asks_inside(source: Node) -> bool:
    """The same of a graph that a higher-order op runs."""
    inner = None
    if source.op == "get_attr":
        inner = getattr(source.graph.owning_module, str(source.target), None)
    return isinstance(inner, GraphModule) and any(map(asks_for_nan, inner.graph.nodes))


def _origin(node: Node) -> Node:
    """The node whose bits this one has, seen past views and copies."""
    while node.target in _WHOLE:
        node = node.all_input_nodes[0]
    return node


def _holds_infinity(node: Node) -> bool:
    """True for a call with an infinity among its numbers, and for such a constant."""
    if node.op == "get_attr":
        tensor = constant_tensor(node)
        return tensor is not None and bool(tensor.isinf().any())
    return any(map(math.isinf, numbers(node)))
