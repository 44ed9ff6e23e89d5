"""Which numbers a merge may hold, and what is refused though every probe agrees."""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import dcp_inductor
from dcp_inductor.compiler.plain import _odd


@pytest.fixture(autouse=True)
def fake_group():
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield
    dist.destroy_process_group()


def exchange(bent, lse: Tensor, o: Tensor) -> Tensor:
    """Two exchanges and the merge in base e, of LSEs that ``bent`` has passed."""
    b, h, d = o.shape
    o_parts = o.view(b, 2, h // 2, d).transpose(0, 1).contiguous()
    lse_parts = lse.view(b, 2, h // 2).transpose(0, 1).contiguous()
    got_o, got_lse = torch.empty_like(o_parts), torch.empty_like(lse_parts)
    dist.all_to_all_single(got_o, o_parts)
    dist.all_to_all_single(got_lse, lse_parts)
    x = bent(got_lse)
    weight = torch.exp(x - x.amax(0)).unsqueeze(-1)
    return (got_o * weight).sum(0) / weight.sum(0)


def window(x: Tensor) -> Tensor:
    """1 where x is within 0.003 of 25.6, by a product that is no condition."""
    cube = x * x * x
    return (cube > 16772).float() * (cube < 16783).float()


HIDDEN = {
    "a product of conditions": lambda x: x - 5 * window(x),
    "relus": lambda x: (
        x - torch.relu(x**3 - 16770) + 2 * torch.relu(x**3 - 16775)
        - torch.relu(x**3 - 16780)
    ),
    "a rounded index": lambda x: x - 1e-9 * torch.round(x),
    "a table of numbers": lambda x: torch.linspace(0, 0, 9)[
        (x * 0.0).nan_to_num().to(torch.int64)
    ]
    + x,
}  # fmt: skip


def explained(bent):
    o, lse = torch.randn(3, 4, 8), torch.randn(3, 4)
    return dcp_inductor.explain(lambda o, lse: exchange(bent, lse, o), o, lse)


@pytest.mark.parametrize("name", HIDDEN)
def test_what_no_probe_can_find_is_refused(name):
    report = explained(HIDDEN[name])
    assert report.fused == 0
    assert "a merge has no use for" in str(report) or "isn't the LSE" in str(report)


def test_the_same_chain_without_it_fuses():
    assert explained(lambda x: x).fused == 1


@pytest.mark.parametrize(
    "sizes",
    [
        (),
        (0.0, 1.0, 2.0, 4.0, 0.25, math.inf),
        (math.log(2), math.log2(math.e), 1.4426950216293335),
        (1e-20, 1e-20),
        (1e30, 1e-30),
    ],
)
def test_numbers_of_a_merge(sizes):
    assert _odd(sizes, num_ranks=4) is None


@pytest.mark.parametrize("sizes", [(0.99,), (3.0,), (1e-9, 2e-9), (1e30, 2e30)])
def test_numbers_that_a_merge_has_no_use_for(sizes):
    assert _odd(sizes, num_ranks=4) == sizes[-1]
