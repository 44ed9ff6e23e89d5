"""The table of spellings: where in a graph a collective is, and what it moves.

A new host is a new row of SPELLINGS. What is around the collective is region.py's
business; nothing here judges whether the exchange is DCP's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, Node

from dcp_inductor.report import Miss


@dataclass(frozen=True)
class Exchange:
    """One all-to-all: rank r's chunk p of ``sent`` becomes rank p's chunk r.

    node: the collective. sent: what it reads, cut into num_ranks equal chunks of its
    flat elements in order. received: the nodes that hold its result.
    """

    node: Node
    sent: Node
    received: tuple[Node, ...]
    group_name: str
    num_ranks: int

    def __str__(self) -> str:
        return f"{self.node.name} on group {self.group_name!r}"


Found = Exchange | Miss | None


@dataclass(frozen=True)
class Spelling:
    """A row: ``read`` gives None for any other node, Miss for a use it can't take."""

    name: str
    read: Callable[[Node], Found]


def find_exchanges(graph: Graph) -> list[tuple[Node, Exchange | Miss]]:
    """Every collective that a row of the table knows, in graph order."""
    found: list[tuple[Node, Exchange | Miss]] = []
    for node in graph.nodes:
        for spelling in SPELLINGS:
            exchange = spelling.read(node)
            if exchange is not None:
                found.append((node, exchange))
                break
    return found


def argument(node: Node, name: str) -> Any:
    """The argument called ``name`` of an op's call, passed by place or by word."""
    if name in node.kwargs:
        return node.kwargs[name]
    for place, parameter in enumerate(node.target._schema.arguments):  # type: ignore
        if parameter.name == name:
            return node.args[place] if place < len(node.args) else None
    raise AssertionError(f"{node.target} has no argument {name!r}")


def _read_functional_all_to_all(node: Node) -> Found:
    """``_c10d_functional.all_to_all_single`` and its waits, torch 2.11 to 2.15.

        sent -> all_to_all_single(sent, [k, k, ..], [k, k, ..], group) -> wait_tensor

    Functional collectives and ``dist.all_to_all_single(out, inp)`` both arrive so.
    """
    if node.target is not torch.ops._c10d_functional.all_to_all_single.default:
        return None
    splits = [*argument(node, "input_split_sizes")]
    if not _all_equal(splits + [*argument(node, "output_split_sizes")]):
        return Miss("its splits are uneven: DCP gives every rank as many heads")
    waits = tuple(node.users)
    if any(not _is_wait(user) for user in waits):
        return Miss("its result is read without wait_tensor")
    return Exchange(
        node,
        argument(node, "input"),
        waits,
        str(argument(node, "group_name")),
        len(splits),
    )


def _is_wait(node: Node) -> bool:
    return node.target is torch.ops._c10d_functional.wait_tensor.default


def _all_equal(sizes: list[Any]) -> bool:
    """True if all sizes are one: the same int, or the same symbolic expression."""
    first, *rest = [_expression(size) for size in sizes]
    return all(size == first for size in rest)


def _expression(size: Any) -> Any:
    if isinstance(size, Node):
        size = size.meta["val"]
    return size.node.expr if isinstance(size, torch.SymInt) else size


SPELLINGS: tuple[Spelling, ...] = (
    Spelling("functional c10d", _read_functional_all_to_all),
)
