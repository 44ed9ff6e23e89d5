"""Puts the op where a proved region was. The only file that mutates a graph.

What may be rewritten is decided before: by region.py and proof.py.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Graph, Node
from torch.fx.node import map_arg

import dcp_inductor.op  # noqa: F401  (registers the ops)
from dcp_inductor.compiler.layout import Permute, Recipe, SourceDim
from dcp_inductor.compiler.proof import Proof
from dcp_inductor.compiler.region import Region

aten = torch.ops.aten

# Of a node that is replaced: what later passes and traces want to know about its
# stand-in. "custom" holds the user stream.
_CARRIED_META = ("stack_trace", "nn_module_stack", "from_node", "custom")


def rewrite(graph: Graph, region: Region, proof: Proof) -> Node:
    """Replace ``region`` by one op at the place of its last exchange.

    Returns the op's node. The old exchange goes with its waits, which dead-code
    elimination would keep as impure.
    """
    last = region.exchanges[-1].node
    emit = _Emitter(graph, last)
    o = emit.recipe(proof.layout.o_in, region.partial_o, region.partial_o)
    lse = emit.recipe(proof.layout.lse_in, region.partial_lse, region.partial_o)
    args = (o, lse, region.group_name, region.num_ranks, proof.lse_mode)
    if region.merged_lse is None:
        op = out = emit.call(torch.ops.dcp_inductor.a2a_lse_reduce.default, args)
    else:
        op = emit.call(torch.ops.dcp_inductor.a2a_lse_reduce_with_lse.default, args)
        out = emit.call(operator.getitem, (op, 0))
        out_lse = emit.call(operator.getitem, (op, 1))
        assert proof.layout.lse_out is not None, "proved with its merged LSE"
        out_lse = emit.recipe(proof.layout.lse_out, out_lse, region.partial_o)
        region.merged_lse.replace_all_uses_with(out_lse)
    out = emit.recipe(proof.layout.out, out, region.partial_o)
    region.merged.replace_all_uses_with(out)
    _erase(graph, region)
    return op


def _erase(graph: Graph, region: Region) -> None:
    """Erase what nobody reads any more, from the merged result back to the pack."""
    inside: list[Node] = []
    for step in region.steps:
        if isinstance(step, Node):
            inside.append(step)
        else:
            inside += [*step.buffer, step.node, *step.received]
    for node in reversed(inside):
        if node.op == "call_function" and not node.users and not node._erased:
            graph.erase_node(node)


class _Emitter:
    """Adds nodes before ``place``, each with the value that it has on fake tensors."""

    def __init__(self, graph: Graph, place: Node) -> None:
        self.graph = graph
        self.place = place

    def call(self, target: Callable[..., Any], args: tuple[Any, ...]) -> Node:
        with self.graph.inserting_before(self.place):
            node = self.graph.call_function(target, args)
        for key in _CARRIED_META:
            if key in self.place.meta:
                node.meta[key] = self.place.meta[key]
        fake_args = map_arg(args, lambda n: n.meta["val"])
        with _fake_mode(fake_args):
            node.meta["val"] = target(*fake_args)
        return node

    def recipe(self, recipe: Recipe, node: Node, partial_o: Node) -> Node:
        for step in recipe:
            if isinstance(step, Permute):
                node = self.call(aten.permute.default, (node, list(step.dims)))
            else:
                sizes = [self._size(size, partial_o) for size in step.sizes]
                node = self.call(aten.reshape.default, (node, sizes))
        return node

    def _size(self, size: int | SourceDim, partial_o: Node) -> int | Node:
        if isinstance(size, SourceDim):
            return self.call(aten.sym_size.int, (partial_o, size.dim))
        return size


def _fake_mode(args: Any) -> Any:
    for value in torch.utils._pytree.tree_leaves(args):
        if isinstance(value, torch._subclasses.FakeTensor):
            return value.fake_mode
    raise AssertionError("a graph of an Inductor pass holds fake tensors")
