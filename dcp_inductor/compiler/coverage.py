"""Which branches of a region the probes took.

NOTE [branches]
A condition that no probe made true (or none made false) hides what stands behind it:
``where((x > 25) & (x < 26), 0, x)`` is the identity on data that never comes there. So
a condition that was only ever seen one way is a refusal. Left out are conditions that
a merge guards with and that no probe may meet: NaN (also as ``x != x``), +inf, a total
that is exactly 0, and what follows from a condition that is left out.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from dcp_inductor.compiler.movement import is_constant, is_mover
from dcp_inductor.compiler.region import Region
from dcp_inductor.report import Miss

aten = torch.ops.aten
_GUARDS_AGAINST_NAN: frozenset[Any] = frozenset(
    {aten.isnan.default, aten.isinf.default, aten.isposinf.default}
)
_EQUALITY: frozenset[Any] = frozenset({aten.eq.Scalar, aten.ne.Scalar})


class Coverage:
    """Collects, over all runs of a region, how its conditions turned out."""

    def __init__(self, region: Region) -> None:
        self.conditions = [
            node
            for node in region.combine
            if isinstance(node.meta.get("val"), Tensor)
            and node.meta["val"].dtype == torch.bool
            and not is_constant(node)
            and not is_mover(node)
        ]
        self._seen: dict[Node, set[bool]] = {node: set() for node in self.conditions}

    def record(self, values: dict[Node, Any]) -> None:
        """Take what one rank computed in one run."""
        for node, seen in self._seen.items():
            if len(seen) < 2 and values[node].numel():
                seen.update((bool(values[node].any()), bool(values[node].all())))

    def one_sided(self) -> Miss | None:
        """A miss for a condition that came out one way in every run."""
        excused: set[Node] = set()
        for node in self.conditions:
            if len(self._seen[node]) != 1:
                continue
            if _is_guard(node) or excused.intersection(node.all_input_nodes):
                excused.add(node)
                continue
            (way,) = self._seen[node]
            return Miss(
                f"no probe makes {node.name} {str(not way).lower()}, so what it "
                "chooses then isn't proved"
            )
        return None


def _is_guard(node: Node) -> bool:
    numbers = [value for value in node.args if isinstance(value, (int, float))]
    return (
        node.target in _GUARDS_AGAINST_NAN
        or (len(node.args) == 2 and node.args[0] is node.args[1])
        or any(not math.isfinite(value) for value in numbers)
        or (node.target in _EQUALITY and 0 in numbers)
    )
