"""Symbolic sizes: what holds for the batch that is traced needn't hold for the next."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from near_misses.structure import Structure, combine, exchanged, partials


def _size_factor(factor: Callable[..., Any]) -> Callable[..., Any]:
    """A received payload times a number that is made of sizes."""

    def make(groups: dict[str, Any]) -> Callable[..., Any]:
        def fn(o: Tensor, lse: Tensor, *rest: Tensor) -> Any:
            got_o, got_lse = exchanged(groups, o, lse)
            times = factor(o.shape[0], *(x.shape[0] for x in rest))
            return combine(got_o * times, got_lse)[0], [x + 1 for x in rest]

        return fn

    return make


def _late_rows(first: int) -> Callable[..., Any]:
    """Rows from ``first`` on are weighted otherwise."""

    def make(groups: dict[str, Any]) -> Callable[..., Any]:
        def fn(o: Tensor, lse: Tensor) -> Any:
            got_o, got_lse = exchanged(groups, o, lse)
            row = torch.arange(o.shape[0]).unsqueeze(-1)
            return combine(got_o, torch.where(row >= first, got_lse * 0.5, got_lse))[0]

        return fn

    return make


def _late_rows_sliced(groups: dict[str, Any]) -> Callable[..., Any]:
    def fn(o: Tensor, lse: Tensor) -> Any:
        got_o, got_lse = exchanged(groups, o, lse)
        keep = min(o.shape[0], 64)
        got_lse = torch.cat([got_lse[:, :keep], got_lse[:, keep:] * 0.5], 1)
        return combine(got_o, got_lse)[0]

    return fn


def _item_factor(groups: dict[str, Any]) -> Callable[..., Any]:
    """A factor read off a tensor on the host."""

    def fn(o: Tensor, lse: Tensor, count: Tensor) -> Any:
        got_o, got_lse = exchanged(groups, o, lse)
        return combine(got_o * (count.item() // 100 + 1), got_lse)[0]

    return fn


def _padded_batch(groups: dict[str, Any]) -> Callable[..., Any]:
    """The batch padded to a multiple of 8, then computed on: [P, H * D]."""

    def fn(o: Tensor, lse: Tensor) -> Any:
        more = -o.shape[0] % 8
        o = torch.nn.functional.pad(o.flatten(1), (0, 0, 0, more)) * 2
        lse = torch.nn.functional.pad(lse, (0, 0, 0, more)) + 1
        got = exchanged(groups, o.view(-1, 4, 8), lse)
        return combine(*got)[0]

    return fn


def _batch_of_two(groups: dict[str, Any]) -> Callable[..., Any]:
    """A batch of T - B + 8 rows: two symbols that are equal when traced."""

    def fn(o: Tensor, lse: Tensor, x: Tensor) -> Any:
        rows = x.shape[0] - o.shape[0] + 8
        o = o.flatten(1).repeat(4, 1)[:rows] * 2
        lse = lse.repeat(4, 1)[:rows] + 1
        got = exchanged(groups, o.view(-1, 4, 8), lse)
        return combine(*got)[0], x + 1

    return fn


def _counted_batch(groups: dict[str, Any]) -> Callable[..., Any]:
    """The batch's size as a sum of ones."""

    def fn(o: Tensor, lse: Tensor) -> Any:
        got_o, got_lse = exchanged(groups, o, lse)
        count = torch.ones(o.shape[0]).sum()
        return combine(torch.where(count > 50, got_o * 2, got_o), got_lse)[0]

    return fn


def _counted_rows(groups: dict[str, Any]) -> Callable[..., Any]:
    """The same from received data: finite LSEs are counted."""

    def fn(o: Tensor, lse: Tensor) -> Any:
        got_o, got_lse = exchanged(groups, o, lse)
        count = (got_lse > -torch.inf).float().sum()
        return combine(torch.where(count > 300, got_o * 2, got_o), got_lse)[0]

    return fn


def _with_batch_of(other: Callable[[int], int]) -> Any:
    return lambda rng, b: (*partials(rng, b), torch.randn(other(b), 2, generator=rng))


BATCH_SIZES = [
    Structure(
        "factor of another batch",
        "a size that isn't proportional",
        _size_factor(lambda b, t: t // b),
        _with_batch_of(lambda b: 4 if b == 4 else 3 * b),
        dynamic=(0, 1, 2),
    ),
    Structure(
        "factor of a large batch",
        "a size that isn't proportional",
        _size_factor(lambda b: b // 100 + 1),
        partials,
        dynamic=(0, 1),
    ),
    Structure(
        "factor of the batch",
        "computes with its size",
        _size_factor(lambda b: b),
        partials,
        dynamic=(0, 1),
    ),
    Structure(
        "factor of an odd batch",
        "a size that isn't proportional",
        _size_factor(lambda b: 2 - b % 2),
        partials,
        dynamic=(0, 1),
        batch=5,
    ),
    Structure(
        "rows from 6 on",
        "may depend on a row's place",
        _late_rows(6),
        partials,
        dynamic=(0, 1),
    ),
    Structure(
        "rows from 20 on",
        "may depend on a row's place",
        _late_rows(20),
        partials,
        dynamic=(0, 1),
    ),
    Structure(
        "rows from 1000 on",
        "may depend on a row's place",
        _late_rows(1000),
        partials,
        dynamic=(0, 1),
    ),
    Structure(
        "rows from 64 on, sliced",
        "a size that isn't proportional",
        _late_rows_sliced,
        partials,
        dynamic=(0, 1),
        batch=100,
    ),
    Structure(
        "factor from the host",
        "a size that isn't proportional",
        _item_factor,
        lambda rng, b: (*partials(rng, b), torch.tensor(200)),
        scalars=True,
    ),
    Structure(
        "batch of two symbols",
        "a size that isn't proportional",
        _batch_of_two,
        _with_batch_of(lambda b: b + 1 if b > 4 else b),
        dynamic=(0, 1, 2),
    ),
    Structure(
        "batch counted by ones",
        "reduces over it",
        _counted_batch,
        partials,
        dynamic=(0, 1),
    ),
    Structure(
        "rows counted",
        "reduces over it",
        _counted_rows,
        partials,
        dynamic=(0, 1),
    ),
    Structure(
        "batch padded to 8",
        "a size that isn't proportional",
        _padded_batch,
        partials,
        dynamic=(0, 1),
        batch=6,
    ),
]
