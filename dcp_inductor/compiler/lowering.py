"""Inductor lowering of the op: its lane, its strides, its order among collectives.

NOTE [lane]
No physical stream exists when a graph is lowered, and a raw stream pointer differs
from rank to rank. What is known is the user stream that Dynamo put on the node; the
lowering numbers those streams densely, in order of first appearance among the ops of
the graph, 0 for none. The number is the same on every rank, and the runtime resolves
it to a workspace slot.

NOTE [order]
The op becomes a ``_CollectiveKernel``: Inductor chains these in graph order, so two
ranks that compiled the same graph can't emit two exchanges in different orders. A
fallback kernel is reordered for peak memory.

NOTE [strides]
A node that a pass inserts has no stride constraint of its own: Inductor may hand it any
layout. The inputs are held to the strides that they have in the graph, so a permuted
view reaches the kernel as a view and nothing else is undone.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch._inductor import ir
from torch._inductor.lowering import (
    add_layout_constraint,
    constrain_to_fx_strides,
    register_lowering,
)
from torch._inductor.virtualized import V

import dcp_inductor.op  # noqa: F401  (registers the ops)

_LANE_OF = {
    "a2a_lse_reduce": "a2a_lse_reduce_lane",
    "a2a_lse_reduce_with_lse": "a2a_lse_reduce_with_lse_lane",
}


@functools.cache
def register() -> None:
    """Tell Inductor how to lower the ops; once a process."""
    for name, lane_name in _LANE_OF.items():
        op = getattr(torch.ops.dcp_inductor, name).default
        kernel = getattr(torch.ops.dcp_inductor, lane_name).default
        add_layout_constraint(op, constrain_to_fx_strides)
        register_lowering(op, type_promotion_kind=None)(_lower(kernel))


def _lower(kernel: torch._ops.OpOverload) -> Callable[..., Any]:
    def lowered(
        partial_o: Any, partial_lse: Any, group_name: str, cp_size: int, lse_mode: str
    ) -> Any:
        outputs = ir._CollectiveKernel.create_out_of_place(
            kernel,
            partial_o,
            partial_lse,
            group_name,
            cp_size,
            lse_mode,
            _lane(V.graph.current_node),
        )
        if isinstance(outputs, (list, tuple)):
            return [ir.TensorBox.create(output) for output in outputs]
        return ir.TensorBox.create(outputs)

    return lowered


def _lane(node: torch.fx.Node) -> int:
    """The dense number of the node's user stream in its graph, NOTE [lane]."""
    stream = _user_stream(node)
    if stream is None:
        return 0
    streams: dict[Any, int] = {}
    for other in node.graph.nodes:
        name = getattr(other.target, "_opname", None)
        if name in _LANE_OF and (other_stream := _user_stream(other)) is not None:
            streams.setdefault(other_stream, len(streams) + 1)
    return streams[stream]


def _user_stream(node: torch.fx.Node) -> Any:
    return (node.meta.get("custom") or {}).get("stream") or None
