"""The merge, and beside it an LSE that isn't the merged one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from near_misses.reasons import NOT_A_MERGE
from near_misses.structure import Structure, exchanged, leaking, partials


def _returning_lse(
    merged_lse: Callable[[Tensor, Tensor, Tensor], Tensor],
) -> Callable[..., Any]:
    """Also returns something like the merged LSE, of the LSE, its max and the total."""

    def make(groups: dict[str, Any]) -> Callable[..., Any]:
        def fn(o: Tensor, lse: Tensor) -> Any:
            got_o, got_lse = exchanged(groups, o, lse)
            top = got_lse.amax(0)
            weight = torch.exp(got_lse - top)
            total = weight.sum(0)
            out = (weight.unsqueeze(-1) * got_o).sum(0) / total.unsqueeze(-1)
            return out, merged_lse(got_lse, top, total)

        return fn

    return make


MERGED_LSES = [
    Structure(
        "merged LSE with an epsilon",
        NOT_A_MERGE,
        _returning_lse(lambda lse, top, total: top + torch.log(total + 1e-3)),
        partials,
    ),
    Structure(
        "merged LSE in the other base",
        NOT_A_MERGE,
        _returning_lse(lambda lse, top, total: top + torch.log2(total)),
        partials,
    ),
    Structure(
        "merged LSE without its max",
        NOT_A_MERGE,
        _returning_lse(lambda lse, top, total: torch.log(total)),
        partials,
    ),
    Structure(
        "mean LSE",
        NOT_A_MERGE,
        _returning_lse(lambda lse, top, total: lse.mean(0)),
        partials,
    ),
    Structure(
        "merged LSE of -1e30 where all are empty",
        "merged LSE",
        _returning_lse(
            lambda lse, top, total: torch.where(
                top == -torch.inf, -1e30, top + torch.log(total)
            )
        ),
        partials,
    ),
    Structure(
        "max returned", NOT_A_MERGE, leaking(lambda o, lse: lse.amax(0)), partials
    ),
]
