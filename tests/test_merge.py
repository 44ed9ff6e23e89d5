"""merge.py against fp64 and the worked values of public bug reports."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dcp_inductor.errors import BadInput
from dcp_inductor.merge import a2a_lse_reduce_reference, merge

INF, NAN = math.inf, math.nan


def column(*values: float) -> torch.Tensor:
    """One row a rank: ``[N, 1]`` LSEs, or ``[N, 1, 1]`` payloads unsqueezed."""
    return torch.tensor(values).reshape(-1, 1)


def merged(o: tuple[float, ...], lse: tuple[float, ...], mode: str) -> tuple:
    out, out_lse = merge(column(*o).unsqueeze(-1), column(*lse), lse_mode=mode)
    return out.item(), out_lse.item()


WORKED = {
    (2, "basee"): [[73.10586, 74.10586], [75.10586, 76.10586]],
    (2, "base2"): [[66.66667, 67.66667], [68.66667, 69.66667]],
    (4, "basee"): [
        [249.2653, 250.2653],
        [251.2653, 252.2653],
        [253.2653, 254.2653],
        [255.2653, 256.2653],
    ],
    (4, "base2"): [
        [226.6667, 227.6667],
        [228.6667, 229.6667],
        [230.6667, 231.6667],
        [232.6667, 233.6667],
    ],
}


@pytest.mark.parametrize(("num_ranks", "mode"), WORKED)
def test_worked_exchange_shows_head_map_source_order_and_base(num_ranks, mode):
    heads = 2 * num_ranks
    rank, head = torch.arange(float(num_ranks)), torch.arange(float(heads))
    o = (100 * rank[:, None] + head).reshape(num_ranks, 1, heads, 1)
    lse = rank[:, None, None].expand(num_ranks, 1, heads)
    for receiver, wanted in enumerate(WORKED[num_ranks, mode]):
        out, _ = a2a_lse_reduce_reference(o, lse, rank=receiver, lse_mode=mode)
        torch.testing.assert_close(
            out.flatten(), torch.tensor(wanted), rtol=1e-6, atol=0
        )


CASES = [
    # o, lse, mode, merged o, merged LSE
    ((0.0, 1.0), (math.log(2), math.log(8)), "basee", 0.8, math.log(10)),
    ((0.0, 1.0), (1.0, 3.0), "base2", 0.8, math.log2(10)),
    ((1.0, 2.0, 3.0, 4.0), (10.0, 7.0, 0.0, -3.0), "basee", 1.0475167, 10.0486328),
    ((1.0, 2.0, 3.0, 4.0), (10.0, 7.0, 0.0, -3.0), "base2", 1.1130623, 10.1713332),
    ((5.0, NAN), (1.5, -INF), "basee", 5.0, 1.5),
    ((5.0, INF), (1.5, -INF), "base2", 5.0, 1.5),
    ((5.0, 0.0), (1.5, INF), "basee", 5.0, 1.5),
    ((5.0, 0.0), (1.5, NAN), "base2", 5.0, 1.5),
    ((NAN, 3.0), (-INF, -INF), "basee", 0.0, -INF),
    ((7.0, 9.0), (-1e30, -1e30), "basee", 8.0, -1e30),
    ((0.0, 1.0), (1.0, 1.0), "basee", 0.5, 1.693147),
    ((0.0, 1.0), (1.0, 1.0), "base2", 0.5, 2.0),
    ((0.0, 1.0), (65.2, 65.4), "basee", 0.549835, 65.9981389),
    ((100.0, 101.0, 102.0, 103.0), (0.0, 0.1, 0.2, 0.3), "basee", 101.62465, 1.5425355),
]


@pytest.mark.parametrize(("o", "lse", "mode", "wanted", "wanted_lse"), CASES)
def test_worked_rows(o, lse, mode, wanted, wanted_lse):
    out, out_lse = merged(o, lse, mode)
    assert out == pytest.approx(wanted, rel=2e-6)
    assert out_lse == pytest.approx(wanted_lse, rel=2e-6)


def test_padding_rows_stay_zero_beside_real_ones():
    o = torch.tensor([1.0, 3.0]).reshape(2, 1, 1, 1).expand(2, 4, 2, 1).clone()
    lse = torch.zeros(2, 4, 2)
    o[:, 3], lse[:, 3] = NAN, -INF
    out, _ = merge(o, lse, lse_mode="basee")
    assert out.flatten().tolist() == [2.0] * 6 + [0.0, 0.0]


def test_bf16_is_rounded_once():
    o = torch.tensor([100.0, 101.0, 102.0, 103.0]).reshape(4, 1, 1).bfloat16()
    out, _ = merge(o, column(0.0, 0.1, 0.2, 0.3), lse_mode="basee")
    assert out.dtype == torch.bfloat16
    assert out.item() == 101.5


def test_fp8_partials_average():
    o = torch.tensor([1.0, 3.0]).reshape(2, 1, 1).to(torch.float8_e4m3fn)
    out, _ = merge(o, column(0.5, 0.5), lse_mode="base2")
    assert out.float().item() == 2.0


@given(st.integers(1, 6), st.integers(0, 2**31), st.sampled_from(["base2", "basee"]))
@settings(max_examples=60, deadline=None, derandomize=True)
def test_equals_attention_over_the_whole_sequence(num_ranks, seed, mode):
    """Softmax over all scores in fp64 is what the merge of its shards must give."""
    rng = torch.Generator().manual_seed(seed)
    scores = torch.randn(num_ranks, 7, generator=rng, dtype=torch.float64) * 20
    values = torch.randn(num_ranks, 7, 3, generator=rng, dtype=torch.float64)
    scores[torch.rand(num_ranks, generator=rng) < 0.3] = -INF
    weight = scores.softmax(-1).nan_to_num()
    o = torch.einsum("nt,ntd->nd", weight, values)
    unit = math.log(2) if mode == "base2" else 1.0
    lse = scores.logsumexp(-1) / unit
    out, out_lse = merge(o, lse, lse_mode=mode)
    whole = scores.flatten().softmax(-1).nan_to_num() @ values.reshape(-1, 3)
    torch.testing.assert_close(out, whole)
    torch.testing.assert_close(out_lse, scores.flatten().logsumexp(-1) / unit)


@pytest.mark.parametrize("lse_mode", ["", "2", "natural", None])
def test_unknown_base_is_refused(lse_mode):
    with pytest.raises(BadInput, match="'base2' or lse_mode='basee'"):
        merge(torch.zeros(2, 1, 1), torch.zeros(2, 1), lse_mode=lse_mode)


def test_shapes_that_dont_pair_are_refused():
    with pytest.raises(BadInput, match="without its last axis"):
        merge(torch.zeros(2, 4, 3, 5), torch.zeros(2, 3, 4), lse_mode="base2")
