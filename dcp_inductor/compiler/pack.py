"""The pack half of a region: from an exchange's input back to the two partials.

What is made of the exchange's result is region.py's.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch.fx import Node

from dcp_inductor.compiler.dataflow import DataFlow, dtype_of, numel_of
from dcp_inductor.compiler.movement import is_mover, widens
from dcp_inductor.compiler.opaque import is_opaque
from dcp_inductor.compiler.symbols import assignments
from dcp_inductor.report import Miss


@dataclass(frozen=True)
class Sources:
    """The two partials of one way to read an exchange, and what moves them to it."""

    partial_o: Node
    partial_lse: Node
    pack: tuple[Node, ...]


def cuts(flow: DataFlow, packed: Iterable[Node]) -> list[list[Sources]] | Miss:
    """Where the walk back through movement leaves exactly two tensors; each cut
    with the ways to tell the payload from the LSE.

    packed: what the exchanges send, and what else their merge reads of this rank.

    The deepest such cut comes first; the ones before it are for graphs whose
    partials were widened or repeated before they were packed, and are tried where
    the deepest leads to no region. None of them goes behind padding: padded heads
    are no heads. A user kernel may pack or compute, so the cuts on both of its
    sides are tried.
    """
    frontier = flow.variables(packed)
    pack: list[Node] = []
    places: list[tuple[set[Node], int]] = []
    while True:
        if len(frontier) == 2 and None not in map(dtype_of, frontier):
            places.append((frontier, len(pack)))
        node = max(
            (n for n in frontier if is_mover(n) or widens(n) or is_opaque(n)),
            key=flow.place.__getitem__,
            default=None,
        )
        if node is None:
            break
        if node.target is torch.ops.aten.constant_pad_nd.default:
            places.clear()
        pack.append(node)
        frontier = frontier - {node} | flow.variables(node.all_input_nodes)
    if not places:
        return _not_two(frontier)
    return [
        [
            Sources(*pair, tuple(flow.with_constants(pack[:length])))
            for pair in _orders(ends)
        ]
        for ends, length in reversed(places)
    ]


def _orders(ends: Iterable[Node]) -> list[tuple[Node, Node]]:
    """(payload, LSE) of two tensors: the LSE has fewer elements; both ways if equal."""
    first, second = sorted(ends, key=lambda node: node.name)
    sizes = assignments((first, second))[0]
    first_numel, second_numel = numel_of(first, sizes), numel_of(second, sizes)
    if first_numel == second_numel:
        return [(first, second), (second, first)]
    return [(first, second) if first_numel > second_numel else (second, first)]


def _not_two(frontier: set[Node]) -> Miss:
    names = ", ".join(sorted(node.name for node in frontier))
    return Miss(
        f"it carries {len(frontier)} tensor(s) ({names}); DCP's exchange carries "
        "exactly two, the partial output and its LSE"
    )
