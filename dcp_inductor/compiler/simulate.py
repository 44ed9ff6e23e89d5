"""Runs a region for N ranks in one process, on the CPU, on data of the caller's.

    for each rank r:      sent[r]     = pack(partial_o[r], partial_lse[r])
    for each receiver p:  received[p] = [chunk p of sent[r] for r in ranks]
                          merged[p]   = combine(received[p])

All ranks run in lockstep, from one collective to the next; after the last only the
receivers that are asked for go on.

What the data should be and what the result means is proof.py's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node
from torch.fx.node import map_arg

from dcp_inductor.compiler.coverage import Coverage
from dcp_inductor.compiler.exchange import Exchange, with_arguments
from dcp_inductor.compiler.movement import constant_tensor, is_size
from dcp_inductor.compiler.opaque import CantRun, is_kernel
from dcp_inductor.compiler.opaque import run as run_kernel
from dcp_inductor.compiler.region import Region
from dcp_inductor.compiler.symbols import Assignment

_CPU = torch.device("cpu")
_EMPTY_OPS = ("empty", "new_empty")


class CantSimulate(Exception):
    """The region holds something that can't be run here; str() says what."""


@dataclass(frozen=True)
class Outcome:
    """What one receiver gets. Contiguous fp64, in the shapes of the region's nodes.

    merged_wide is the merged result before its last cast to the dtype of the
    partials, or None where the region doesn't end in such a cast.
    """

    merged: Tensor
    merged_wide: Tensor | None
    merged_lse: Tensor | None


class Simulation:
    """One region under one assignment of its symbols."""

    def __init__(self, region: Region, sizes: Assignment) -> None:
        self.region = region
        self.sizes = sizes
        self.coverage = Coverage(region)
        self._calls: dict[Node, tuple[Any, Any]] = {}
        # Of the last run, by rank: what it sent, all exchanges.
        self.sent: list[list[Tensor]] = []
        self.o_shape = sizes.sizes(region.partial_o.meta["val"].shape)
        self.lse_shape = sizes.sizes(region.partial_lse.meta["val"].shape)

    def run(
        self, partial_o: Tensor, partial_lse: Tensor, receivers: Sequence[int]
    ) -> list[Outcome]:
        """Exchange and merge.

        partial_o ``[N, *o_shape]`` and partial_lse ``[N, *lse_shape]`` hold each
        rank's partials. Returns one Outcome a receiver. Raises CantSimulate.
        """
        values = [
            self._partials(*partials)
            for partials in zip(partial_o, partial_lse, strict=True)
        ]
        last = self.region.exchanges[-1]
        self.sent = [[] for _ in values]
        running: Sequence[int] = range(self.region.num_ranks)
        for step in self.region.steps:
            if isinstance(step, Exchange):
                running = receivers if step is last else running
                self._exchange(step, values, running)
                continue
            for rank in running:
                if step not in values[rank]:
                    values[rank][step] = self._value(step, values[rank], rank)
        for rank in running:
            self.coverage.record(values[rank])
        return [self._outcome(values[rank]) for rank in receivers]

    def _partials(self, partial_o: Tensor, partial_lse: Tensor) -> dict[Node, Any]:
        """What one rank starts with."""
        given = (
            (self.region.partial_o, partial_o),
            (self.region.partial_lse, partial_lse),
        )
        return {node: _strided_like(data, node, self.sizes) for node, data in given}

    def _exchange(
        self,
        exchange: Exchange,
        values: list[dict[Node, Any]],
        receivers: Sequence[int],
    ) -> None:
        """Give each of ``receivers`` what all ranks send it."""
        sent = [known[exchange.sent] for known in values]
        for kept, tensor in zip(self.sent, sent, strict=True):
            kept.append(tensor)
        for receiver in receivers:
            try:
                data = _received(exchange, sent, receiver)
                for node in exchange.received:
                    like: Tensor = node.meta["val"]
                    shape = self.sizes.sizes(like.shape)
                    values[receiver][node] = data.view(like.dtype).reshape(shape)
            except Exception as error:
                of = str(sent[0].dtype).removeprefix("torch.")
                raise CantSimulate(
                    f"{exchange.node.name}, {exchange.kind} of {of}, {_cant_run(error)}"
                ) from error

    def _outcome(self, values: dict[Node, Any]) -> Outcome:
        region = self.region
        return Outcome(
            values[region.merged].double().contiguous(),
            self._before_last_cast(values),
            None
            if region.merged_lse is None
            else values[region.merged_lse].double().contiguous(),
        )

    def _before_last_cast(self, values: dict[Node, Any]) -> Tensor | None:
        merged = self.region.merged
        if not casts_down(merged):
            return None
        return values[merged.all_input_nodes[0]].double().contiguous()

    def _value(self, node: Node, values: dict[Node, Any], rank: int) -> Any:
        if is_size(node):
            return self._concrete(node.meta["val"])
        if node.op == "get_attr":
            return _constant_value(node)
        args, kwargs = map_arg(self._call(node), values.__getitem__)
        site = self.region.rank_site
        own = {site.parameter: rank} if site and site.node is node else {}
        if is_kernel(node):
            return _launched(node, kwargs, own)
        args = with_arguments(node, args, own) if own else args
        try:
            result = _ran(node.target, args, kwargs)
        except Exception as error:
            raise CantSimulate(
                f"{node.name} ({node.target}) {_cant_run(error)}"
            ) from error
        if node.op == "call_function" and _leaves_garbage(node):
            _poison(result)
        return result

    def _call(self, node: Node) -> tuple[Any, Any]:
        """The arguments of a node, concrete but for the nodes among them."""
        if node not in self._calls:
            self._calls[node] = self._concrete(node.args), self._concrete(node.kwargs)
        return self._calls[node]

    def _concrete(self, value: Any) -> Any:
        """Symbols become integers, devices the CPU, in nested arguments."""
        if isinstance(value, torch.SymInt):
            return self.sizes.size(value)
        if isinstance(value, torch.device):
            return _CPU
        if isinstance(value, (list, tuple)):
            return type(value)(self._concrete(item) for item in value)
        if isinstance(value, dict):
            return {key: self._concrete(item) for key, item in value.items()}
        return value


def _ran(target: Any, args: Any, kwargs: Any) -> Any:
    if target is torch.ops.prims.convert_element_type.default:
        # The same, less a reference implementation in Python.
        return args[0].to(args[1])
    return target(*args, **kwargs)


def _cant_run(error: Exception) -> str:
    first_line = next(iter(str(error).splitlines()), "")
    return f"can't be run on the CPU: {type(error).__name__}: {first_line}"


def _launched(
    node: Node, call: dict[str, Any], changed: dict[str, int]
) -> dict[str, Tensor]:
    try:
        return run_kernel(call, changed)
    except CantRun as error:
        raise CantSimulate(f"{node.name}, a user kernel, {error}") from error


def casts_down(node: Node) -> bool:
    """True for a cast from fp32 to a narrower float."""
    if node.target is not torch.ops.prims.convert_element_type.default:
        return False
    source, result = node.all_input_nodes[0].meta["val"], node.meta["val"]
    return source.dtype == torch.float32 and result.dtype.itemsize < 4


def _received(exchange: Exchange, sent: Sequence[Tensor], receiver: int) -> Tensor:
    """Contiguous, in the order in which the collective lays it down."""
    num_ranks = len(sent)
    if exchange.kind == "all_gather":
        return torch.cat([tensor.reshape(-1) for tensor in sent])
    if exchange.axis is None:
        chunks = [tensor.reshape(-1).chunk(num_ranks)[receiver] for tensor in sent]
    else:
        chunks = [tensor.chunk(num_ranks, exchange.axis)[receiver] for tensor in sent]
    if exchange.kind == "reduce_scatter":
        return torch.stack(chunks).sum(0)
    return torch.cat(chunks, exchange.axis or 0)


def _strided_like(data: Tensor, node: Node, sizes: Assignment) -> Tensor:
    """``data`` in the strides that the graph has for ``node``, where they can hold it.

    Overlapping strides (an expanded partial) can't hold independent elements; then
    the data lies contiguously, which movement ops don't see.
    """
    stride = sizes.sizes(node.meta["val"].stride())
    strided = torch.empty_strided(data.shape, stride, dtype=data.dtype, device=_CPU)
    if torch._debug_has_internal_overlap(strided) != 0:
        return data.contiguous()
    return strided.copy_(data)


def _constant_value(node: Node) -> Tensor:
    value = constant_tensor(node)
    if value is None:
        raise CantSimulate(f"the constant {node.target} has no value at compile time")
    return value


def _leaves_garbage(node: Node) -> bool:
    name = getattr(node.target, "_opname", "")
    return name.startswith(_EMPTY_OPS)


def _poison(tensor: Tensor) -> None:
    """Uninitialised memory as the worst that it can be: NaN, all bits set."""
    if tensor.numel() and tensor.is_contiguous() and tensor.dim():
        tensor.view(torch.uint8).fill_(255)
    elif tensor.is_floating_point():
        tensor.fill_(float("nan"))
