"""What only looks like DCP's exchange stays as it is, and says why.

Each case is checked to be none: on the data that it brings, the unfused graph differs
from merge.py. Whatever fuses after all must give the unfused graph's numbers.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from harness import Captured, captured, fake_world, normalised, traced
from near_misses import NEAR_MISSES, REST, STRUCTURES, UNDEFINED, NearMiss, Structure
from torch import Tensor

from dcp_inductor.merge import a2a_lse_reduce_reference

# Of the size that the sum could have: what a merge in fp32 may be off by.
ROUNDING = 2e-5


@pytest.fixture(scope="module")
def groups():
    with fake_world() as groups:
        yield groups


def partials(case: NearMiss, seed: int) -> tuple[Tensor, Tensor]:
    """All ranks' [N, B, H, D] and [N, B, H], on which the case shows."""
    rng = torch.Generator().manual_seed(seed)
    shape = case.num_ranks, case.num_tokens, case.num_heads, case.head_dim
    o, lse = case.shows(rng, *shape)
    return o.to(case.dtype), lse


def traced_case(case: NearMiss, groups) -> Captured:
    o, lse = partials(case, 1)
    return traced(case.function(groups), (o[0], lse[0]))


def largest_error(
    case: NearMiss, outputs: list[list[Tensor]], wanted: list[Tensor], o, lse
) -> float:
    """Relative to the merge of absolute values, where ``outputs`` are finite."""
    worst = 0.0
    for rank, (got, value) in enumerate(zip(outputs, wanted, strict=True)):
        size, _ = a2a_lse_reduce_reference(
            o.double().abs(), lse.double(), rank=rank, lse_mode="basee"
        )
        error = (got[0].double() - value.double()).abs() / size.clamp(min=1e-38)
        error = error[got[0].isfinite()].nan_to_num(torch.inf)
        worst = max(worst, float(error.max()) if error.numel() else 0.0)
    return worst


@pytest.mark.parametrize(
    "case", [pytest.param(case, id=case.name) for case in NEAR_MISSES]
)
def test_near_miss_is_refused(case: NearMiss, groups):
    found = traced_case(case, groups)
    o, lse = partials(case, 2)
    unfused = found.run([*zip(o, lse, strict=True)], before=True)
    merged = [
        a2a_lse_reduce_reference(o.double(), lse.double(), rank=r, lse_mode="basee")[0]
        for r in range(case.num_ranks)
    ]
    assert largest_error(case, unfused, merged, o, lse) > ROUNDING, "it is the merge"
    assert_left_alone(found, case.reason)


@pytest.mark.parametrize("case", REST, ids=str)
def test_change_outside_the_merge_stays(case: NearMiss, groups):
    found = traced_case(case, groups)
    assert (found.num_ops, found.num_collectives) == (1, 0)
    o, lse = partials(case, 2)
    inputs = [*zip(o, lse, strict=True)]
    unfused, fused = found.run(inputs, before=True), found.run(inputs)
    wanted = [outputs[0] for outputs in unfused]
    assert largest_error(case, fused, wanted, o, lse) <= ROUNDING


@pytest.mark.parametrize("case", UNDEFINED, ids=str)
def test_undefined_inputs_change_nothing_else(case: NearMiss, groups):
    found = traced_case(case, groups)
    o, lse = partials(replace(case, shows=NearMiss.shows), 2)
    inputs = [*zip(o, lse, strict=True)]
    unfused, fused = found.run(inputs, before=True), found.run(inputs)
    wanted = [outputs[0] for outputs in unfused]
    rounding = max(ROUNDING, 2 * torch.finfo(case.dtype).eps)
    assert largest_error(case, fused, wanted, o, lse) <= rounding


@pytest.mark.parametrize("case", STRUCTURES, ids=str)
def test_structure_is_refused(case: Structure, groups):
    rng = torch.Generator().manual_seed(1)
    args = case.args(rng, case.batch)
    for place in case.dynamic:
        torch._dynamo.mark_dynamic(args[place], 0)
    found = captured(case.make(groups), args, case.edit, allow_scalars=case.scalars)
    assert_left_alone(found, case.reason)


def assert_left_alone(found: Captured, reason: str) -> None:
    num_ops, reasons = found.num_ops, found.reasons
    assert num_ops == 0, "it was fused"
    assert any(reason in given for given in reasons), reasons
    assert normalised(found.before) == normalised(found.after)
