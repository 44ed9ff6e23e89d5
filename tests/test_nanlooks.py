"""A program that asks for NaN behind a merge which makes some: nanlooks.py.

Rows whose shards are all empty are NaN in a merge without a guard, and 0 in the op.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from corpus import Entry, exchange, finite_max
from harness import Captured, captured, fake_world
from near_misses.twist import NearMiss, Twist, twisted
from torch import Tensor

REFUSED = "looks for NaN or infinity behind the merge"
GUARD = Twist(
    top=lambda lse: finite_max(lse.amax(0, keepdim=True)),
    total=lambda total, lse: total.clamp(min=1.0),
)
SHAPE = (2, 6, 8, 16)  # N, B, H, D


@dataclass(frozen=True)
class Behind:
    """What a program makes of the merged result: something that no NaN survives."""

    name: str
    made: Callable[[Tensor], Tensor]

    def __str__(self) -> str:
        return self.name


def _if_number(y: Tensor, number: Tensor) -> Tensor:
    return torch.where(number, y, 0.0)


def _far_away(out: Tensor) -> Tensor:
    y = (out.flatten(1) @ torch.ones(8 // 2 * 16, 5)).relu() + 1
    return _if_number(y, ~torch.isnan(y.clone()))


ASKS = [
    Behind("isnan", lambda out: _if_number(out + 1, ~torch.isnan(out + 1))),
    Behind("of a view", lambda out: torch.isnan(out.view(-1)).float() + 1),
    Behind("nan_to_num", lambda out: torch.nan_to_num(out + 1)),
    Behind("isfinite", lambda out: _if_number(out + 1, torch.isfinite(out + 1))),
    Behind("isinf", lambda out: _if_number(1 / (out + 1), ~torch.isinf(1 / (out + 1)))),
    Behind("equal to itself", lambda out: _if_number(out + 1, out == out)),
    Behind(
        "equal to its copy", lambda out: _if_number(out + 1, out.view(-1, 4, 16) == out)
    ),
    Behind("unequal to itself", lambda out: (out != out).float()),
    Behind("below infinity", lambda out: _if_number(out + 1, out.abs() < torch.inf)),
    Behind(
        "below a constant infinity",
        lambda out: _if_number(out + 1, out.abs() < torch.full((16,), torch.inf)),
    ),
    Behind("nansum", lambda out: torch.nansum(out + 1, -1)),
    Behind("nanmedian", lambda out: torch.nanmedian(out + 1, 1).values),
    Behind("far away", _far_away),
]
ASKS_NOT = [
    Behind("threshold", lambda out: torch.where(out > 0.5, out, out * 0.5)),
    Behind("its halves", lambda out: _if_number(out[:3], out[:3] <= out[3:])),
    Behind("largest", lambda out: out + out.amax(-1, keepdim=True)),
    Behind("sorted", lambda out: out.sort(-1).values),
    Behind("cast", lambda out: (out * 2).to(torch.float16)),
]


@pytest.fixture(scope="module")
def groups():
    with fake_world() as groups:
        yield groups


def _partials(*, empty_rows: bool) -> list[tuple[Tensor, Tensor]]:
    rng = torch.Generator().manual_seed(3)
    o = torch.randn(SHAPE, generator=rng)
    lse = torch.randn(SHAPE[:3], generator=rng)
    if empty_rows:
        lse[:, ::2] = -torch.inf
    return [*zip(o, lse, strict=True)]


def _traced(fn: Callable[..., Any], *more: Tensor) -> Captured:
    return captured(fn, (*_partials(empty_rows=False)[0], *more))


def _spelled(behind: Behind, twist: Twist, groups: dict[str, Any]) -> Captured:
    merge = twisted(NearMiss("", "", twist), groups["2"])
    return _traced(lambda o, lse: behind.made(merge(o, lse)))


def _same(new: list[list[Tensor]], old: list[list[Tensor]]) -> bool:
    pairs = zip(new, old, strict=True)
    return all(
        torch.allclose(a, b, atol=2e-3, rtol=2e-3, equal_nan=True)
        for ours, theirs in pairs
        for a, b in zip(ours, theirs, strict=True)
    )


@pytest.mark.parametrize("behind", ASKS, ids=str)
def test_question_behind_an_unguarded_merge_is_refused(behind, groups):
    found = _spelled(behind, Twist(), groups)
    assert found.num_ops == 0, "it was fused"
    assert any(REFUSED in reason for reason in found.reasons), found.reasons


@pytest.mark.parametrize("behind", ASKS, ids=str)
def test_without_the_rule_its_numbers_change(behind, groups, monkeypatch):
    monkeypatch.setattr("dcp_inductor.compiler.fusion_pass.asks_for_nan", lambda n: 0)
    found = _spelled(behind, Twist(), groups)
    assert found.num_ops == 1
    inputs = _partials(empty_rows=True)
    assert not _same(found.run(inputs), found.run(inputs, before=True))
    full = _partials(empty_rows=False)
    assert _same(found.run(full), found.run(full, before=True))


@pytest.mark.parametrize("behind", ASKS, ids=str)
def test_question_behind_a_guarded_merge_stays(behind, groups):
    found = _spelled(behind, GUARD, groups)
    assert (found.num_ops, found.num_collectives) == (1, 0), found.reasons
    for empty_rows in (False, True):
        inputs = _partials(empty_rows=empty_rows)
        assert _same(found.run(inputs), found.run(inputs, before=True))


@pytest.mark.parametrize("behind", ASKS_NOT, ids=str)
def test_what_asks_for_no_nan_fuses(behind, groups):
    found = _spelled(behind, Twist(), groups)
    assert (found.num_ops, found.num_collectives) == (1, 0), found.reasons


def test_question_in_a_branch(groups):
    def fn(o: Tensor, lse: Tensor, merge: Any) -> Any:
        y = merge(o, lse) + 1
        return torch.cond(y.shape[0] + o.sum() > 0, torch.nan_to_num, torch.neg, (y,))

    for twist, num_ops in ((GUARD, 1), (Twist(), 0)):
        merge = twisted(NearMiss("", "", twist), groups["2"])
        args = _partials(empty_rows=False)[0]
        found = captured(functools.partial(fn, merge=merge), args, num_graphs=3)
        assert found.num_ops == num_ops, found.reasons


def test_questions_about_others_are_no_matter(groups):
    """Of the LSE before it travels, and of a tensor beside the merge."""
    merge = twisted(NearMiss("", ""), groups["2"])

    def fn(o: Tensor, lse: Tensor, beside: Tensor) -> Any:
        lse = torch.where(torch.isnan(lse), -torch.inf, lse)
        return merge(o, lse), torch.nan_to_num(beside)

    found = _traced(fn, torch.zeros(3))
    assert (found.num_ops, found.num_collectives) == (1, 0), found.reasons


def test_question_about_the_merged_lse(groups):
    """Where all ranks are empty it is -inf, and NaN without a guard."""

    def fn(o: Tensor, lse: Tensor, merge: Any) -> Any:
        out, merged_lse = merge(o, lse)
        return out, torch.where(torch.isnan(merged_lse + 1), -5.0, merged_lse)

    for guard, num_ops in (("where", 1), ("none", 0)):
        merge = exchange(Entry("", guard=guard, with_lse="returned"), groups["2"])
        found = _traced(functools.partial(fn, merge=merge))
        assert found.num_ops == num_ops, found.reasons
