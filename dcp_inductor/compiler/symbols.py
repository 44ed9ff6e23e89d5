"""Concrete sizes for symbolic graphs: what a proof runs a dynamic graph with.

A proof of a graph with symbols holds for the sizes that it was run with; proof.py runs
two assignments, and the layouts it finds must agree.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import sympy
import torch
from torch.fx import Node
from torch.utils._sympy.functions import FloorDiv

# Coprime to each other and to usual head counts, so that sizes don't coincide; times
# the first multiple at which every quotient of the graph is exact.
_VALUES = (5, 7, 11, 13, 17, 19)
_MULTIPLES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)


@dataclass(frozen=True)
class Assignment:
    """An integer for each free symbol; empty for a static graph."""

    values: tuple[tuple[sympy.Symbol, int], ...]

    def size(self, value: Any) -> int:
        """The integer that a size, stride or SymInt has under this assignment."""
        if isinstance(value, torch.SymInt):
            return int(value.node.expr.xreplace(dict(self.values)))
        return int(value)

    def sizes(self, values: Iterable[Any]) -> tuple[int, ...]:
        return tuple(self.size(value) for value in values)


def assignments(nodes: Iterable[Node]) -> tuple[Assignment, ...]:
    """One assignment for a static region, two for one with symbols.

    Symbols of equal hint get equal values: sglang's batch of ``o`` and of ``lse`` are
    two symbols that only the run ties together.
    """
    sizes = [size for node in nodes for size in _sym_ints(node.meta.get("val"))]
    symbols = {
        symbol: _hint(size, symbol)
        for size in sizes
        for symbol in sorted(size.node.expr.free_symbols, key=str)
    }
    if not symbols:
        return (Assignment(()),)
    quotients = {q for size in sizes for q in size.node.expr.atoms(FloorDiv)}
    for multiple in _MULTIPLES:
        found = tuple(_assignment(symbols, shift, multiple) for shift in (0, 1))
        if all(map(partial(_exact, quotients), found)):
            break
    return found


def _assignment(
    symbols: dict[sympy.Symbol, object], shift: int, multiple: int
) -> Assignment:
    hints = {hint: place for place, hint in enumerate(dict.fromkeys(symbols.values()))}
    return Assignment(
        tuple(
            (symbol, multiple * _VALUES[(hints[hint] + shift) % len(_VALUES)])
            for symbol, hint in symbols.items()
        )
    )


def _exact(quotients: Iterable[sympy.Expr], assignment: Assignment) -> bool:
    values = dict(assignment.values)
    return all(
        base.xreplace(values) % divisor.xreplace(values) == 0
        for base, divisor in (quotient.args for quotient in quotients)
    )


def _hint(value: torch.SymInt, symbol: sympy.Symbol) -> object:
    shape_env: Any = value.node.shape_env
    known = getattr(shape_env, "backed_var_to_val", None)
    if known is None:
        known = shape_env.var_to_val
    return known.get(symbol, str(symbol))


def _sym_ints(value: Any) -> list[torch.SymInt]:
    if isinstance(value, torch.SymInt):
        return [value]
    if isinstance(value, torch.Tensor):
        every = (*value.shape, *value.stride(), value.storage_offset())
        return [size for size in every if isinstance(size, torch.SymInt)]
    if isinstance(value, (list, tuple)):
        return [size for item in value for size in _sym_ints(item)]
    return []
