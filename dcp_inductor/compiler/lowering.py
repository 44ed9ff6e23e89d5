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

NOTE [site]
Ranks that meet at different calls of one geometry must notice. Each op carries its
place among the ops of its graph, which the kernel sends along. Graphs themselves
aren't hashed in: they may hold a rank's constants elsewhere.

NOTE [direct call]
What the generated Python calls is the function behind the op, not the op: the
dispatcher's way into a Python implementation costs more than all that the function
does. A C++ wrapper calls the op.

NOTE [strides]
A node that a pass inserts has no stride constraint of its own: Inductor may hand it any
layout. The inputs are held to the strides that they have in the graph, so a permuted
view reaches the kernel as a view and nothing else is undone.
"""

from __future__ import annotations

import functools
import zlib
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

import dcp_inductor.op

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


class _Exchange(ir._CollectiveKernel):
    """NOTE [order] and NOTE [direct call]."""

    def codegen(self, wrapper: Any) -> None:
        if not V.graph.cpp_wrapper:
            wrapper.add_import_once(f"import {dcp_inductor.op.__name__}")
            function = dcp_inductor.op.DIRECT[str(self.op_overload)]
            self.python_kernel_name = f"{function.__module__}.{function.__name__}"
        super().codegen(wrapper)


def _lower(kernel: torch._ops.OpOverload) -> Callable[..., Any]:
    def lowered(
        partial_o: Any, partial_lse: Any, group_name: str, cp_size: int, lse_mode: str
    ) -> Any:
        outputs = _Exchange.create_out_of_place(
            kernel,
            partial_o,
            partial_lse,
            group_name,
            cp_size,
            lse_mode,
            *_lane_and_site(V.graph.current_node),
        )
        if isinstance(outputs, (list, tuple)):
            return [ir.TensorBox.create(output) for output in outputs]
        return ir.TensorBox.create(outputs)

    return lowered


def _lane_and_site(node: torch.fx.Node) -> tuple[int, int]:
    """NOTE [lane] and NOTE [site] for one node of a graph that is being lowered."""
    ops = [n for n in node.graph.nodes if getattr(n.target, "_opname", "") in _LANE_OF]
    streams = dict.fromkeys(s for s in map(_user_stream, ops) if s is not None)
    lanes = {stream: lane for lane, stream in enumerate(streams, start=1)}
    lane = lanes.get(_user_stream(node), 0)
    site = f"{ops.index(node)} of {len(ops)}"
    return lane, zlib.crc32(site.encode())


def _user_stream(node: torch.fx.Node) -> Any:
    return (node.meta.get("custom") or {}).get("stream") or None
