"""The table of spellings: where in a graph a collective is, and what it moves.

A new host is a new row of SPELLINGS. What is around the collective is region.py's
business; nothing here judges whether the exchange is DCP's.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import sympy
import torch
from torch.fx import Graph, Node

from dcp_inductor.compiler.movement import is_mover
from dcp_inductor.report import Miss

Kind = Literal["all_to_all", "all_gather", "reduce_scatter"]


@dataclass(frozen=True)
class Exchange:
    """One collective of N ranks.

    all_to_all: rank r's chunk p of ``sent`` becomes rank p's chunk r. all_gather: all
    of every rank's ``sent``, in order of ranks. reduce_scatter: the sum over ranks of
    chunk p goes to rank p.

    node: the collective. sent: what it reads, cut into num_ranks equal chunks: of its
    axis ``axis``, or of its flat elements in order. received: the nodes that hold its
    result. num_ranks: None where the graph doesn't say, NOTE [number of ranks] of
    region.py. buffer: what makes the memory that a host's op receives into, in graph
    order.
    """

    node: Node
    sent: Node
    received: tuple[Node, ...]
    group_name: str
    num_ranks: int | None
    buffer: tuple[Node, ...] = ()
    kind: Kind = "all_to_all"
    axis: int | None = None

    def __str__(self) -> str:
        return f"{self.node.name} on group {self.group_name!r}"


Found = list[Exchange] | Miss | None
Anchors = list[tuple[Node, Exchange | Miss]]


@dataclass(frozen=True)
class Spelling:
    """A row: ``read`` gives None for any other node, Miss for a use it can't take, and
    as many exchanges as one call makes."""

    name: str
    kind: Kind
    read: Callable[[Node], Found]


def find_exchanges(graph: Graph) -> Anchors:
    """Every all-to-all that a row of the table knows, in graph order."""
    return [
        (node, exchange)
        for node in graph.nodes
        for exchange in read_collective(node, "all_to_all")
    ]


def read_collective(node: Node, kind: Kind) -> list[Exchange | Miss]:
    """What a node exchanges, if it is a collective of this kind, else nothing."""
    for spelling in SPELLINGS:
        if spelling.kind == kind:
            found = spelling.read(node)
            if found is not None:
                return [found] if isinstance(found, Miss) else [*found]
    return []


def sent_by(node: Node) -> Node:
    """What a collective of the table reads, also one that no row can take."""
    if node.target in _FUNCTIONALIZED:
        op: Any = node.args[0]
        sent: Any = node.kwargs[MUTABLE_OPS[op._schema.name].sent]
        return sent
    return argument(node, "input")


def argument(node: Node, name: str) -> Any:
    """The argument called ``name`` of an op's call, passed by place or by word."""
    if name in node.kwargs:
        return node.kwargs[name]
    for place, parameter in enumerate(node.target._schema.arguments):  # type: ignore
        if parameter.name == name:
            return node.args[place] if place < len(node.args) else None
    raise AssertionError(f"{node.target} has no argument {name!r}")


def with_arguments(
    node: Node, args: tuple[Any, ...], changed: dict[str, Any]
) -> tuple[Any, ...]:
    """``args`` of an op's call, with other values for those that ``changed`` names."""
    parameters = node.target._schema.arguments  # type: ignore
    named = zip((p.name for p in parameters), args, strict=False)
    return tuple(changed.get(name, value) for name, value in named)


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
    group_name = str(argument(node, "group_name"))
    return [Exchange(node, argument(node, "input"), waits, group_name, len(splits))]


def _read_functional_gather(node: Node) -> Found:
    """``sent -> all_gather_into_tensor(sent, N, group) -> wait_tensor``."""
    if node.target is not torch.ops._c10d_functional.all_gather_into_tensor.default:
        return None
    return _functional(node, "all_gather")


def _read_functional_scatter(node: Node) -> Found:
    """``sent -> reduce_scatter_tensor(sent, "sum", N, group) -> wait_tensor``."""
    if node.target is not torch.ops._c10d_functional.reduce_scatter_tensor.default:
        return None
    reduction = argument(node, "reduce_op")
    if reduction != "sum":
        return Miss(f"its reduce-scatter takes the {reduction}: a merge is a sum")
    return _functional(node, "reduce_scatter")


def _functional(node: Node, kind: Kind) -> Found:
    waits = tuple(node.users)
    if any(not _is_wait(user) for user in waits):
        return Miss("its result is read without wait_tensor")
    group_name, sent = str(argument(node, "group_name")), argument(node, "input")
    num_ranks = int(argument(node, "group_size"))
    return [Exchange(node, sent, waits, group_name, num_ranks, kind=kind)]


@dataclass(frozen=True)
class MutableOp:
    """A host's collective that writes into an argument: the names of its arguments."""

    kind: Kind
    sent: str
    received: str
    group: str


# By qualified name: a host's op is known here without the host being importable.
# sglang's reduce-scatter sums.
_SGLANG: dict[str, Kind] = {
    "reg_all_to_all_single": "all_to_all",
    "reg_all_gather_into_tensor": "all_gather",
    "reg_reduce_scatter_tensor": "reduce_scatter",
}
MUTABLE_OPS = {
    f"sglang::{name}": MutableOp(kind, "input", "output", "group_name")
    for name, kind in _SGLANG.items()
}


def _read_mutable(kind: Kind, node: Node) -> Found:
    """A host op that writes its result into a buffer, functionalized by AOTAutograd.

        v2: auto_functionalized_v2(op, input=sent, group_name=.., _output_base_index=0,
                                   _all_bases=[buffer]) -> getitem(1)
        v1: auto_functionalized(op, output=buffer, input=sent, group_name=..)
                                                        -> getitem(1)

    torch 2.11 to 2.14; SGLang 0.5.23 compiles its piecewise graphs with v1. The results
    of the op itself (None where it has none) come before the buffers.
    """
    if node.target not in _FUNCTIONALIZED:
        return None
    op: Any = node.args[0]
    schema = getattr(op, "_schema", None)  # None: a subgraph that mutates its inputs.
    names = None if schema is None else MUTABLE_OPS.get(schema.name)
    if names is None or names.kind != kind:
        return None
    written = [p.name for p in op._schema.arguments if p.alias_info is not None]
    if node.target is torch.ops.higher_order.auto_functionalized_v2:
        place: Any = node.kwargs[f"_{names.received}_base_index"]
        buffer: Any = node.kwargs["_all_bases"][place]  # type: ignore[index]
        if not _covers(node, f"_{names.received}", buffer):
            return Miss("it receives into a part of a larger buffer")
    else:
        place, buffer = written.index(names.received), node.kwargs[names.received]
    views = _views(buffer)
    owner = views[0]
    if owner.op in ("placeholder", "get_attr"):
        return Miss(
            f"it receives into {owner.name}, a buffer of the caller: what is in it "
            "afterwards can be observed, so the exchange must stay"
        )
    place += max(1, len(op._schema.returns))
    results = tuple(user for user in node.users if user.args[1] == place)
    if len(results) < len(node.users):
        return Miss("more of it is read than what it receives")
    sent: Any = node.kwargs[names.sent]
    return [
        Exchange(
            node,
            sent,
            results,
            str(node.kwargs[names.group]),
            num_ranks=_growth(sent, buffer) if kind != "all_to_all" else None,
            buffer=views,
            kind=kind,
        )
    ]


def _growth(one: Node, other: Node) -> int | None:
    """How many times larger the larger of two tensors is: N of a gather or scatter.
    None where the sizes don't say."""
    small, large = (_num_bytes(node.meta["val"]) for node in (one, other))
    for times in (large / small, small / large) if small != 0 != large else ():
        if times.is_Integer:
            return int(times)
    return None


def _num_bytes(value: torch.Tensor) -> Any:
    """As an expression of the graph's symbols."""
    return sympy.sympify(math.prod(map(_expression, value.shape)) * value.itemsize)


def _read_flashinfer(node: Node) -> Found:
    """FlashInfer's exchange as the sglang plugin shows it, payload and LSE in one call.

        fi_all_to_all(o [.., N, D], stats [.., N, S], N, group) -> (o, stats)

    Peers are the second to last axis of both; integrations/sglang_flashinfer.py.
    """
    if getattr(node.target, "_schema", None) is None:
        return None
    if node.target._schema.name != "dcp_inductor::fi_all_to_all":  # type: ignore
        return None
    group_name = str(argument(node, "group_name"))
    num_ranks = int(argument(node, "cp_size"))
    return [
        Exchange(
            node,
            argument(node, name),
            tuple(user for user in node.users if user.args[1] == place),
            group_name,
            num_ranks,
            axis=-2,
        )
        for place, name in enumerate(("partial_o", "softmax_stats"))
    ]


_FUNCTIONALIZED = (
    torch.ops.higher_order.auto_functionalized_v2,
    torch.ops.higher_order.auto_functionalized,
)


def _covers(node: Node, prefix: str, buffer: Node) -> bool:
    """True if a v2 argument is all of its base: the base itself, or a flat view."""
    if f"{prefix}_slice_dim" in node.kwargs:
        return False
    if f"{prefix}_storage_offset" not in node.kwargs:
        return True
    size: Any = node.kwargs[f"{prefix}_size"]
    stride: Any = node.kwargs[f"{prefix}_stride"]
    base = buffer.meta["val"]
    return bool(
        node.kwargs[f"{prefix}_storage_offset"] == 0
        and math.prod(map(_expression, size)) == math.prod(map(_expression, base.shape))
        and [*map(_expression, stride)] == _contiguous(size)
        and [*map(_expression, base.stride())] == _contiguous(base.shape)
    )


def _contiguous(shape: Any) -> list[Any]:
    inner = [*map(_expression, shape)][1:]
    return [math.prod(inner[place:]) for place in range(len(inner) + 1)]


def _views(node: Node) -> tuple[Node, ...]:
    """``node``, what it is a view of, and so on, outermost last."""
    views = [node]
    while is_mover(views[-1]) and len(views[-1].all_input_nodes) == 1:
        views += views[-1].all_input_nodes
    return tuple(reversed(views))


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
    Spelling("functional c10d", "all_to_all", _read_functional_all_to_all),
    Spelling("functional c10d", "all_gather", _read_functional_gather),
    Spelling("functional c10d", "reduce_scatter", _read_functional_scatter),
    Spelling("mutable host op", "all_to_all", partial(_read_mutable, "all_to_all")),
    Spelling("mutable host op", "all_gather", partial(_read_mutable, "all_gather")),
    Spelling(
        "mutable host op", "reduce_scatter", partial(_read_mutable, "reduce_scatter")
    ),
    Spelling("FlashInfer, shown by a plugin", "all_to_all", _read_flashinfer),
)
