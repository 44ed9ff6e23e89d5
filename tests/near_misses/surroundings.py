"""Merges whose data others read, write or need halfway: one op would fail them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed._functional_collectives as funcol
from torch import Tensor

from near_misses.structure import (
    Structure,
    combine,
    leaking,
    partials,
    plain,
    send,
    split,
)


def _packed_leak(groups: dict[str, Any]) -> Callable[..., Any]:
    def fn(o: Tensor, lse: Tensor) -> Any:
        sent = torch.cat([split(o, 2), split(lse, 2).unsqueeze(-1)], -1)
        got = send(sent, groups["2"])
        return combine(got[..., :-1], got[..., -1])[0], got.sum()

    return fn


def _stale_lse(groups: dict[str, Any]) -> Callable[..., Any]:
    """Weights of all layers from the first layer's LSE, which is returned as well."""

    def fn(o: Tensor, lse: Tensor, o2: Tensor) -> Any:
        got_lse = send(split(lse, 2), groups["2"])
        first = combine(send(split(o, 2), groups["2"]), got_lse)[0]
        second = combine(send(split(o2, 2), groups["2"]), got_lse)[0]
        return first, second

    return fn


def _lse_feeds_payload(groups: dict[str, Any]) -> Callable[..., Any]:
    """The merged LSE is needed before the payload can be sent: one op can't be both."""

    def fn(o: Tensor, lse: Tensor) -> Any:
        got_lse = send(split(lse, 2), groups["2"])
        merged = torch.logsumexp(got_lse, 0)
        got_o = send(split(o * merged.sum().sigmoid(), 2), groups["2"])
        out = (torch.exp(got_lse - merged).unsqueeze(-1) * got_o).sum(0)
        return out, merged

    return fn


def _reduced_between(groups: dict[str, Any]) -> Callable[..., Any]:
    """Another collective between the two exchanges needs the merged LSE."""

    def fn(o: Tensor, lse: Tensor) -> Any:
        got_lse = send(split(lse, 2), groups["2"])
        merged = torch.logsumexp(got_lse, 0)
        total = funcol.all_reduce(merged, "sum", groups["2"])
        got_o = send(split(o + total.sum() * 1e-3, 2), groups["2"])
        out = (torch.exp(got_lse - merged).unsqueeze(-1) * got_o).sum(0)
        return out, total

    return fn


def _edit_before(target: Any, change: Callable[[torch.fx.Graph, torch.fx.Node], Any]):
    """Edits the graph right before the first node of ``target``."""

    def edit(graph: torch.fx.Graph) -> None:
        node = next(node for node in graph.nodes if node.target is target)
        with graph.inserting_before(node):
            change(graph, node)

    return edit


def _mutate_sent(graph: torch.fx.Graph, node: torch.fx.Node) -> None:
    _call(graph, torch.ops.aten.mul_.Tensor, node.args[0], 0.5)


def _mutate_partial(graph: torch.fx.Graph, node: torch.fx.Node) -> None:
    partial = next(n for n in graph.nodes if n.op == "placeholder")
    _call(graph, torch.ops.aten.mul_.Tensor, partial, 0.5)


def _mutate_received(graph: torch.fx.Graph, node: torch.fx.Node) -> None:
    received = [
        n
        for n in graph.nodes
        if n.target is torch.ops._c10d_functional.wait_tensor.default
    ]
    _call(graph, torch.ops.aten.mul_.Tensor, received[0], 0.5)


def _call(graph: torch.fx.Graph, target: Any, tensor: torch.fx.Node, *args: Any) -> Any:
    node = graph.call_function(target, (tensor, *args))
    node.meta["val"] = tensor.meta["val"]
    return node


def _drop_waits(graph: torch.fx.Graph) -> None:
    for node in [*graph.nodes]:
        if node.target is torch.ops._c10d_functional.wait_tensor.default:
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)


_A2A = torch.ops._c10d_functional.all_to_all_single.default
_AMAX = torch.ops.aten.amax.default

SURROUNDINGS = [
    Structure(
        "received payload returned",
        "the received buffer is returned",
        leaking(lambda o, lse: o),
        partials,
    ),
    Structure(
        "received LSE returned",
        "the received buffer is returned",
        leaking(lambda o, lse: lse),
        partials,
    ),
    Structure(
        "received payload summed",
        "the received buffer is also read by",
        leaking(lambda o, lse: o.sum()),
        partials,
    ),
    Structure(
        "received LSE read",
        "is also read by",
        leaking(lambda o, lse: (lse > 0).any()),
        partials,
    ),
    Structure(
        "weights returned",
        "is also read by",
        leaking(lambda o, lse: torch.exp(lse - lse.amax(0))),
        partials,
    ),
    Structure(
        "received packed buffer read",
        "the received buffer is also read by",
        _packed_leak,
        partials,
    ),
    Structure(
        "one LSE for two layers",
        "the received buffer is also read by",
        _stale_lse,
        lambda rng, b: (*partials(rng, b), partials(rng, b)[0]),
    ),
    Structure(
        "merged LSE feeds the payload",
        "inside the merge, is returned",
        _lse_feeds_payload,
        partials,
    ),
    Structure(
        "sent buffer mutated",
        "mutates a tensor",
        plain,
        partials,
        edit=_edit_before(_A2A, _mutate_sent),
    ),
    Structure(
        "partial mutated",
        "mutates a tensor",
        plain,
        partials,
        edit=_edit_before(_A2A, _mutate_partial),
    ),
    Structure(
        "received buffer mutated",
        "is also read by mul_",
        plain,
        partials,
        edit=_edit_before(_AMAX, _mutate_received),
    ),
    Structure("no wait", "without wait_tensor", plain, partials, edit=_drop_waits),
    Structure(
        "merged LSE reduced between",
        "inside the merge, is also read by all_reduce",
        _reduced_between,
        partials,
    ),
]
