"""Which nodes only move bits, and which are constants. Data, not judgement.

NOTE [movement]
The walk from an exchange back to the partials passes what neither computes nor
chooses by value: views, permutes, slices, scatters of whole slices, cat, clone and
bit-casts. An arithmetic op ends the walk, so the partials are what the last arithmetic
before the exchange made. So does an op that repeats elements: what it made is what the
exchange shares out. Widening a payload (bf16 to fp32) is exact and passes too:
what travels is worth no more than what was widened.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch._subclasses.fake_tensor import is_fake
from torch.fx import Node

aten = torch.ops.aten

_MOVERS: frozenset[Any] = frozenset(
    {
        aten.alias.default,
        aten.cat.default,
        aten.clone.default,
        aten.constant_pad_nd.default,
        aten.copy.default,
        aten.detach.default,
        aten.expand.default,
        aten.flip.default,
        aten.lift_fresh_copy.default,
        aten.permute.default,
        aten.reshape.default,
        aten.roll.default,
        aten.select.int,
        aten.select_scatter.default,
        aten.slice.Tensor,
        aten.slice_scatter.default,
        aten.split.Tensor,
        aten.split_with_sizes.default,
        aten.squeeze.default,
        aten.squeeze.dim,
        aten.squeeze.dims,
        aten.stack.default,
        aten.t.default,
        aten.transpose.int,
        aten.unbind.int,
        aten.unsqueeze.default,
        aten.view.default,
        aten.view.dtype,
        aten._unsafe_view.default,
    }
)
_SPLITTERS: frozenset[Any] = frozenset(
    {aten.split.Tensor, aten.split_with_sizes.default, aten.unbind.int}
)
_CASTS: frozenset[Any] = frozenset(
    {torch.ops.prims.convert_element_type.default, aten._to_copy.default}
)
_MANTISSA_BITS = {
    torch.float8_e5m2: 2,
    torch.float8_e4m3fn: 3,
    torch.bfloat16: 7,
    torch.float16: 10,
    torch.float32: 23,
}


def is_mover(node: Node) -> bool:
    """True if the node's value is made of its inputs' bits, placed by shape alone."""
    if node.target is operator.getitem:
        return node.all_input_nodes[0].target in _SPLITTERS
    if node.target is aten.expand.default:
        return node.meta["val"].numel() == node.all_input_nodes[0].meta["val"].numel()
    if node.target is aten.cat.default:
        parts: Any = node.args[0]
        return len({*parts}) == len(parts)
    return node.op == "call_function" and node.target in _MOVERS


def is_cast(node: Node) -> bool:
    """True for a change of dtype by value."""
    return node.op == "call_function" and node.target in _CASTS


def widens(node: Node) -> bool:
    """True for a cast that every value survives: to fp32 from a narrower float."""
    if not is_cast(node):
        return False
    source, result = node.all_input_nodes[0].meta["val"], node.meta["val"]
    return result.dtype == torch.float32 and source.dtype in (
        torch.float16,
        torch.bfloat16,
        torch.float8_e4m3fn,
        torch.float8_e5m2,
    )


def mantissa_bits(dtype: torch.dtype) -> int:
    """Explicit mantissa bits: integers up to ``2 ** (bits + 1)`` are exact."""
    return _MANTISSA_BITS[dtype]


def is_size(node: Node) -> bool:
    """True for a number: a symbolic size, or arithmetic on sizes."""
    return isinstance(node.meta.get("val"), (torch.SymInt, int, bool))


def is_constant(node: Node) -> bool:
    """True for a size, and for a tensor that reads no other tensor."""
    if node.op == "get_attr" or is_size(node):
        return True
    return (
        node.op == "call_function"
        and all(map(is_size, node.all_input_nodes))
        and isinstance(node.target, torch._ops.OpOverload)
        and not node.target._schema.is_mutable
        and torch.Tag.nondeterministic_seeded not in node.target.tags
    )


def takes_a_number(parameter: Any) -> bool:
    """True for a parameter of an op's schema that takes part in its numbers.

    Sizes, axes and dtypes are written ``int`` there, numbers ``number``, ``float`` or
    (a scalar in a tensor's place) ``Tensor``.
    """
    kind = str(parameter.real_type).removeprefix("Optional[").removesuffix("]")
    return kind in ("number", "float", "Tensor")


def constant_tensor(node: Node) -> torch.Tensor | None:
    """The value of a get_attr node on the CPU, or None if it has none here."""
    value: Any = node.graph.owning_module
    for part in str(node.target).split("."):
        value = getattr(value, part, None)
    if not isinstance(value, torch.Tensor) or is_fake(value):
        return None
    return value.detach().cpu()
