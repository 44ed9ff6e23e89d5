"""A region's identity: equal strings mean the same computation, so the same proof."""

from __future__ import annotations

import hashlib
from typing import Any

import sympy
import torch
from torch import Tensor
from torch.fx import Node

from dcp_inductor.compiler.exchange import Exchange
from dcp_inductor.compiler.movement import constant_tensor
from dcp_inductor.compiler.opaque import describe, is_kernel
from dcp_inductor.compiler.region import Region
from dcp_inductor.compiler.symbols import assignments


def fingerprint(region: Region) -> str:
    """Nodes by place, ops, arguments, dtypes, sizes and strides of a region.

    Node and group names are left out: layers of one model are equal. Symbolic sizes are
    written as expressions, with the sizes that the proof gives their symbols.
    """
    return _Writer(region).text()


class _Writer:
    def __init__(self, region: Region) -> None:
        self.region = region
        self.assignments = assignments(region.nodes)
        self.symbols: dict[str, str] = {}
        self.place: dict[Node, str] = {
            region.partial_o: "partial_o",
            region.partial_lse: "partial_lse",
        }

    def text(self) -> str:
        region = self.region
        lines = [f"ranks {region.num_ranks}"]
        lines += [
            f"{self.place[node]} {self._value(node)}"
            for node in (region.partial_o, region.partial_lse)
        ]
        for step in region.steps:
            if isinstance(step, Node):
                lines.append(self._line(step))
            else:
                lines.append(self._exchanged(step))
        if region.rank_site is not None:
            site = region.rank_site
            lines.append(f"rank {self.place[site.node]} {site.parameter}")
        lines.append(f"merged {self.place[region.merged]}")
        if region.merged_lse is not None:
            lines.append(f"merged_lse {self.place[region.merged_lse]}")
        return "\n".join(lines)

    def _exchanged(self, exchange: Exchange) -> str:
        number = self.region.exchanges.index(exchange)
        sent = self.place[exchange.sent]
        line = f"exchange {number} {exchange.kind} {exchange.axis} {sent}"
        for place, node in enumerate(exchange.received):
            self.place[node] = f"received {number}.{place}"
            line += f" {self._value(node)}"
        return line

    def _line(self, node: Node) -> str:
        self.place.setdefault(node, f"%{len(self.place)}")
        call = f"{node.target}{self._argument((node.args, node.kwargs))}"
        if node.op == "get_attr":
            call = _attribute(node)
        elif is_kernel(node):
            passed = (node.kwargs["grid"], node.kwargs["kwargs"])
            return f"{self.place[node]} {describe(node)}{self._argument(passed)}"
        return f"{self.place[node]} {self._value(node)} {call}"

    def _argument(self, value: Any) -> str:
        if isinstance(value, Node):
            return self.place.get(value) or self._value(value)
        if isinstance(value, (list, tuple)):
            return "(" + ",".join(map(self._argument, value)) + ")"
        if isinstance(value, dict):
            return self._argument(tuple(value.items()))
        return self._size(value) if isinstance(value, torch.SymInt) else repr(value)

    def _value(self, node: Node) -> str:
        value = node.meta.get("val")
        if isinstance(value, Tensor):
            sizes = [self._size(size) for size in (*value.shape, *value.stride())]
            return f"{value.dtype}[{','.join(sizes)}]"
        return self._argument(value) if not isinstance(value, Node) else ""

    def _size(self, size: Any) -> str:
        if not isinstance(size, torch.SymInt):
            return str(size)
        values = [{str(s): v for s, v in a.values} for a in self.assignments]
        expr = size.node.expr
        for symbol in sorted(expr.free_symbols, key=str):
            known = [value[str(symbol)] for value in values]
            name = self.symbols.setdefault(str(symbol), f"n{len(self.symbols)}{known}")
            expr = expr.subs(symbol, sympy.Symbol(name, integer=True, positive=True))
        return str(expr)


def _attribute(node: Node) -> str:
    """A constant by its content: two graphs' constants of one name can differ."""
    value = constant_tensor(node)
    if value is None:
        return f"unknown {id(node)}"
    raw = value.contiguous().flatten().view(torch.uint8).numpy().tobytes()
    return hashlib.sha256(raw).hexdigest()
