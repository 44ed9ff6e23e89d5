"""What each value of a graph is computed from, as the graph was read.

Which of these values a region is made of is region.py's.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable
from itertools import chain

import torch
from torch._higher_order_ops.triton_kernel_wrap import triton_kernel_wrapper_functional
from torch.fx import Graph, Node

from dcp_inductor.compiler.exchange import Anchors, Exchange
from dcp_inductor.compiler.movement import is_constant, is_size
from dcp_inductor.compiler.symbols import Assignment


class Stale(Exception):
    """The graph was rewritten where a finder looks; a new one must read it again."""


class _Places(dict[Node, int]):
    """Each node's place in the graph as it was read."""

    def __missing__(self, node: Node) -> int:
        raise Stale(node.name)


class DataFlow:
    """One graph, read once; what a rewrite adds later isn't known here.

    place: each node's place in the graph. found: the anchors of exchanges. of_result:
    the exchange that each received tensor comes from. mutations: nodes that write into
    a tensor. reads: each *closed* node, computed from received data and constants
    alone, with the exchanges it reads; only closed nodes can be part of a merge.
    """

    def __init__(self, graph: Graph, found: Anchors) -> None:
        self.place = _Places((node, place) for place, node in enumerate(graph.nodes))
        self.found = found
        self.of_result = {
            result: exchange
            for _, exchange in self.found
            if isinstance(exchange, Exchange)
            for result in exchange.received
        }
        self.mutations = [node for node in graph.nodes if _mutates(node)]
        self._constants: dict[Node, bool] = {}
        self.reads = self._closed_nodes(graph) if self.of_result else {}
        self.by_reads: dict[frozenset[Exchange], list[Node]] = {}
        for node, reads in self.reads.items():
            self.by_reads.setdefault(reads, []).append(node)

    def _closed_nodes(self, graph: Graph) -> dict[Node, frozenset[Exchange]]:
        """Each closed node with the exchanges whose results it is computed from."""
        closed: dict[Node, frozenset[Exchange]] = {}
        for node in graph.nodes:
            if not is_pure_call(node) or is_size(node):
                continue
            reads: set[Exchange] = set()
            for source in node.all_input_nodes:
                if source in closed:
                    reads |= closed[source]
                elif source in self.of_result:
                    reads.add(self.of_result[source])
                elif not self.constant(source):
                    break
            else:
                if reads:
                    closed[node] = frozenset(reads)
        return closed

    def constant(self, node: Node) -> bool:
        """True if no input of the graph is in it."""
        if node not in self._constants:
            self._constants[node] = is_constant(node) or (
                is_pure_call(node)
                and bool(node.all_input_nodes)
                and all(map(self.constant, node.all_input_nodes))
            )
        return self._constants[node]

    def back(self, ends: Iterable[Node]) -> list[Node]:
        """``ends`` and all they are computed from, up to received data and sizes."""
        seen: set[Node] = set()
        todo = list(ends)
        while todo:
            node = todo.pop()
            if node in seen or node in self.of_result:
                continue
            seen.add(node)
            if not is_size(node):
                todo.extend(node.all_input_nodes)
        return self.in_order(seen)

    def in_order(self, nodes: Iterable[Node]) -> list[Node]:
        """Sorted by place. Raises Stale for a node that a rewrite added."""
        return sorted(nodes, key=self.place.__getitem__)

    def variables(self, nodes: Iterable[Node]) -> set[Node]:
        """Those of ``nodes`` that aren't constant."""
        return {node for node in nodes if not self.constant(node)}

    def with_constants(self, nodes: list[Node]) -> list[Node]:
        """``nodes`` and the constants that they read, in graph order."""
        read = chain.from_iterable(node.all_input_nodes for node in nodes)
        constants = self.back(node for node in read if self.constant(node))
        return self.in_order({*nodes, *constants})


def is_pure_call(node: Node) -> bool:
    """True for an op whose value depends on its inputs alone, and that does no more."""
    if node.op != "call_function":
        return False
    if isinstance(node.target, torch._ops.OpOverload):
        return not (
            node.target._schema.is_mutable
            or node.target.namespace in ("_c10d_functional", "c10d", "dcp_inductor")
            or torch.Tag.nondeterministic_seeded in node.target.tags
        )
    return node.target in _PURE_PYTHON


_PURE_PYTHON: frozenset[Callable] = frozenset(
    {
        triton_kernel_wrapper_functional,
        operator.getitem,
        operator.add,
        operator.sub,
        operator.mul,
        operator.floordiv,
        operator.mod,
        operator.neg,
    }
)


def _mutates(node: Node) -> bool:
    return (
        isinstance(node.target, torch._ops.OpOverload)
        and node.target._schema.is_mutable
    )


def numel_of(node: Node, sizes: Assignment) -> int:
    """Elements of a node's tensor with its symbols at ``sizes``; -1 of no tensor."""
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor):
        return -1
    return math.prod(sizes.sizes(value.shape))


def dtype_of(node: Node) -> torch.dtype | None:
    """The dtype of a node's tensor; None of no tensor."""
    value = node.meta.get("val")
    return value.dtype if isinstance(value, torch.Tensor) else None
