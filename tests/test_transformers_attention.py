"""Shards attended over apart and merged are the whole attention. No transformers."""

from __future__ import annotations

import pytest
import torch

from dcp_inductor.integrations.transformers_attention import attend, with_sinks
from dcp_inductor.merge import merge

B, H, S, E, D = 3, 8, 11, 16, 12
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2e-2}


def inputs(kv_heads: int, dtype: torch.dtype):
    rng = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=rng).to(dtype)

    mask = torch.ones(B, 1, 1, S, dtype=torch.bool)
    mask[0, ..., : S - 1] = False  # all but one shard are empty
    mask[1, ..., :4] = False
    return (
        normal(B, H, 1, E),
        normal(B, kv_heads, S, E),
        normal(B, kv_heads, S, D),
        mask,
    )


def whole(query, key, value, mask, scaling, softcap, sinks):
    """In double, sinks as one more key of value 0."""
    groups = H // key.shape[1]
    key, value = (t.double().repeat_interleave(groups, 1) for t in (key, value))
    scores = query.double() @ key.transpose(2, 3) * scaling
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    scores = scores.masked_fill(~mask, -torch.inf)
    if sinks is not None:
        scores = torch.cat(
            [scores, sinks.double().view(1, H, 1, 1).expand(B, -1, 1, 1)], -1
        )
        value = torch.cat([value, torch.zeros(B, H, 1, D, dtype=value.dtype)], 2)
    return scores.softmax(-1) @ value, scores.logsumexp(-1)


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
@pytest.mark.parametrize("kv_heads", [1, 2, 8])
@pytest.mark.parametrize("softcap", [None, 1.5])
@pytest.mark.parametrize("with_sink", [False, True])
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_shards_merge_to_the_whole(num_ranks, kv_heads, softcap, with_sink, dtype):
    query, key, value, mask = inputs(kv_heads, dtype)
    sinks = torch.linspace(-1, 3, H) if with_sink else None
    partials = []
    for rank in range(num_ranks):
        mine = slice(rank, None, num_ranks)
        o, lse = attend(
            query, key[:, :, mine], value[:, :, mine], mask[..., mine], 0.5, softcap
        )
        if sinks is not None:
            none = torch.full((H,), -torch.inf)
            o, lse = with_sinks(o, lse, (sinks if rank == 0 else none)[:, None])
        assert (o.dtype, lse.dtype) == (dtype, torch.float32)
        partials.append((o, lse))
    o, lse = (torch.stack(each) for each in zip(*partials, strict=True))
    got, got_lse = merge(o, lse, lse_mode="basee")
    want, want_lse = whole(query, key, value, mask, 0.5, softcap, sinks)
    error = (got.double() - want).abs().max() / want.abs().max()
    assert error < TOLERANCE[dtype]
    assert (got_lse - want_lse).abs().max() < 10 * TOLERANCE[dtype]


def test_an_empty_shard_is_0_and_minus_infinity():
    query, key, value, mask = inputs(2, torch.float32)
    o, lse = attend(query, key, value, torch.zeros_like(mask), 0.5)
    assert (o == 0).all()
    assert (lse == -torch.inf).all()
    o, lse = with_sinks(o, lse, torch.tensor(-torch.inf))
    assert (o == 0).all()
    assert (lse == -torch.inf).all()
