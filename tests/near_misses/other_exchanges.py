"""Exchanges of another kind: other tensors, groups, splits, dtypes or denominators."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed._functional_collectives as funcol
from torch import Tensor

from near_misses.reasons import ALL_WEIGHT, NOT_A_MERGE, NOT_IN_EITHER_BASE
from near_misses.structure import Structure, combine, exchanged, partials, send, split


def _two_groups(groups: dict[str, Any]) -> Callable[..., Any]:
    def fn(o: Tensor, lse: Tensor) -> Any:
        return combine(
            send(split(o, 2), groups["2"]), send(split(lse, 2), groups["other 2"])
        )[0]

    return fn


def _uneven(groups: dict[str, Any]) -> Callable[..., Any]:
    """Rank 0 keeps one head and rank 1 three; each gets as many from each."""

    def fn(o: Tensor, lse: Tensor) -> Any:
        sent = torch.cat([o, lse.unsqueeze(-1)], -1).transpose(0, 1).contiguous()
        got = funcol.all_to_all_single(sent, [2, 2], [1, 3], groups["2"])
        got = got.unflatten(0, (2, 2))
        return combine(got[..., :-1], got[..., -1])[0]

    return fn


def _padded_heads(groups: dict[str, Any]) -> Callable[..., Any]:
    def fn(o: Tensor, lse: Tensor) -> Any:
        o = torch.nn.functional.pad(o, (0, 0, 0, 1))
        lse = torch.nn.functional.pad(lse, (0, 1), value=-torch.inf)
        got = exchanged(groups, o, lse)
        return combine(*got)[0]

    return fn


def _dispatch(groups: dict[str, Any]) -> Callable[..., Any]:
    """Tokens to their experts and back: one tensor, no merge."""

    def fn(x: Tensor, weight: Tensor) -> Any:
        got = send(x, groups["2"])
        return send(torch.relu(got @ weight), groups["2"])

    return fn


def _three_in_one(groups: dict[str, Any]) -> Callable[..., Any]:
    def fn(o: Tensor, lse: Tensor, scale: Tensor) -> Any:
        sent = torch.cat(
            [split(o, 2), split(lse, 2)[..., None], split(scale, 2)[..., None]], -1
        )
        got = send(sent, groups["2"])
        return combine(got[..., :-2] * got[..., -1:], got[..., -2])[0]

    return fn


def _three_exchanges(groups: dict[str, Any]) -> Callable[..., Any]:
    def fn(o: Tensor, lse: Tensor, scale: Tensor) -> Any:
        got_o, got_lse, got_scale = exchanged(groups, o, lse, scale)
        return combine(got_o * got_scale.unsqueeze(-1), got_lse)[0]

    return fn


def _lse_of_another(groups: dict[str, Any]) -> Callable[..., Any]:
    """Two packed layers; the first is weighted by the second's LSE."""

    def fn(o: Tensor, lse: Tensor, o2: Tensor, lse2: Tensor) -> Any:
        got, got2 = (
            send(torch.cat([split(a, 2), split(b, 2)[..., None]], -1), groups["2"])
            for a, b in ((o, lse), (o2, lse2))
        )
        return (
            combine(got[..., :-1], got2[..., -1])[0],
            combine(got2[..., :-1], got[..., -1])[0],
        )

    return fn


def _one_rank(groups: dict[str, Any]) -> Callable[..., Any]:
    def fn(o: Tensor, lse: Tensor) -> Any:
        return combine(*(send(split(x, 1), groups["1"]) for x in (o, lse)))[0]

    return fn


def _own_partial_again(groups: dict[str, Any]) -> Callable[..., Any]:
    """The rank's own heads are merged from where they were, not from the exchange."""

    def fn(o: Tensor, lse: Tensor) -> Any:
        got_o, got_lse = exchanged(groups, o, lse)
        got_o = torch.cat([split(o, 2)[:1], got_o[1:]])
        got_lse = torch.cat([split(lse, 2)[:1], got_lse[1:]])
        return combine(got_o, got_lse)[0]

    return fn


def _with_sink(groups: dict[str, Any]) -> Callable[..., Any]:
    """An attention sink in the denominator: a parameter of the model."""

    def fn(o: Tensor, lse: Tensor, sink: Tensor) -> Any:
        got_o, got_lse = exchanged(groups, o, lse)
        weight = torch.exp(got_lse)
        out = (weight.unsqueeze(-1) * got_o).sum(0)
        return out / (weight.sum(0) + sink.exp()).unsqueeze(-1)

    return fn


def _constant_sink(groups: dict[str, Any]) -> Callable[..., Any]:
    def fn(o: Tensor, lse: Tensor) -> Any:
        got_o, got_lse = exchanged(groups, o, lse)
        weight = torch.exp(got_lse)
        out = (weight.unsqueeze(-1) * got_o).sum(0)
        return out / (weight.sum(0) + 1.0).unsqueeze(-1)

    return fn


def _narrow_lse(groups: dict[str, Any]) -> Callable[..., Any]:
    def fn(o: Tensor, lse: Tensor) -> Any:
        got_o, got_lse = exchanged(groups, o, lse)
        return combine(got_o, got_lse.float())[0].to(o.dtype)

    return fn


def _dropout(groups: dict[str, Any]) -> Callable[..., Any]:
    def fn(o: Tensor, lse: Tensor) -> Any:
        got_o, got_lse = exchanged(groups, o, lse)
        weight = torch.nn.functional.dropout(torch.softmax(got_lse, 0), 0.1)
        return (weight.unsqueeze(-1) * got_o).sum(0)

    return fn


def _constant_scale(scale: float) -> Callable[..., Any]:
    """A tensor of the graph itself, one number a source."""

    def make(groups: dict[str, Any]) -> Callable[..., Any]:
        def fn(o: Tensor, lse: Tensor) -> Any:
            got_o, got_lse = exchanged(groups, o, lse)
            factor = torch.tensor([1.0, scale])[:, None, None, None]
            return combine(got_o * factor, got_lse)[0]

        return fn

    return make


def _three(rng: torch.Generator, b: int) -> Any:
    return *partials(rng, b), torch.randn(b, 4, generator=rng)


def _two_pairs(rng: torch.Generator, b: int) -> Any:
    return *partials(rng, b), *partials(rng, b)


OTHER_EXCHANGES = [
    Structure("constant scale of 1.001", NOT_A_MERGE, _constant_scale(1.001), partials),
    Structure("two groups", "different groups", _two_groups, partials),
    Structure("uneven splits", "splits are uneven", _uneven, partials),
    Structure(
        "heads padded",
        "nothing made from its result alone",
        _padded_heads,
        lambda rng, b: (
            torch.randn(b, 5, 8, generator=rng),
            torch.randn(b, 5, generator=rng),
        ),
    ),
    Structure(
        "expert dispatch",
        "carries 1 tensor",
        _dispatch,
        lambda rng, b: (
            torch.randn(b, 8, generator=rng),
            torch.randn(8, 8, generator=rng),
        ),
    ),
    Structure("three tensors in one", "carries 3 tensor", _three_in_one, _three),
    Structure(
        "three exchanges",
        "nothing made from its result alone",
        _three_exchanges,
        _three,
    ),
    Structure(
        "another layer's LSE",
        "nothing made from its result alone",
        _lse_of_another,
        _two_pairs,
    ),
    Structure("one rank", "one rank", _one_rank, partials),
    Structure(
        "own partial from before", "carries 1 tensor", _own_partial_again, partials
    ),
    Structure(
        "sink parameter",
        NOT_IN_EITHER_BASE,
        _with_sink,
        lambda rng, b: (*partials(rng, b), torch.randn(2, generator=rng)),
    ),
    Structure("constant sink", ALL_WEIGHT, _constant_sink, partials),
    Structure(
        "LSE in bf16",
        "is torch.bfloat16, not fp32",
        _narrow_lse,
        lambda rng, b: (partials(rng, b)[0], partials(rng, b)[1].bfloat16()),
    ),
    Structure(
        "LSE in fp64",
        "is torch.float64, not fp32",
        _narrow_lse,
        lambda rng, b: (partials(rng, b)[0], partials(rng, b)[1].double()),
    ),
    Structure(
        "payload in fp64",
        "is torch.float64",
        _narrow_lse,
        lambda rng, b: (partials(rng, b)[0].double(), partials(rng, b)[1]),
    ),
    Structure("dropout", "carries 1 tensor", _dropout, partials),
]
