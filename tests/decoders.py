"""Two plain spellings of DCP's exchange, for tests of everything around the pass."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor


def packed(o: Tensor, lse: Tensor, num_ranks: int, group: str = "0") -> Tensor:
    """LSE bits behind the payload in one all-to-all; base 2, guarded."""
    b, h, d = o.shape
    o_parts = o.view(b, num_ranks, h // num_ranks, d).transpose(0, 1)
    lse_parts = lse.view(b, num_ranks, h // num_ranks, 1).transpose(0, 1).contiguous()
    sent = torch.cat([o_parts, lse_parts.view(o.dtype)], -1)
    received = dist._functional_collectives.all_to_all_single(sent, None, None, group)
    received_lse = received[..., d:].contiguous().view(torch.float32)
    top = received_lse.amax(0, keepdim=True)
    top = torch.where(top == -torch.inf, torch.zeros_like(top), top)
    weight = torch.exp2(received_lse - top)
    total = (received[..., :d].float() * weight).sum(0)
    return (total / weight.sum(0).clamp(min=1.0)).to(o.dtype)


def two_exchanges(o: Tensor, lse: Tensor, num_ranks: int) -> tuple[Tensor, Tensor]:
    """Payload and LSE apart, in place; base e, with the merged LSE."""
    b, h, d = o.shape
    o_parts = o.view(b, num_ranks, h // num_ranks, d).transpose(0, 1).contiguous()
    lse_parts = lse.view(b, num_ranks, h // num_ranks).transpose(0, 1).contiguous()
    got_o, got_lse = torch.empty_like(o_parts), torch.empty_like(lse_parts)
    dist.all_to_all_single(got_o, o_parts)
    dist.all_to_all_single(got_lse, lse_parts)
    merged_lse = torch.logsumexp(got_lse, 0)
    weight = torch.exp(got_lse - merged_lse).unsqueeze(-1)
    return (got_o.float() * weight).sum(0).to(o.dtype), merged_lse


def layers(o: Tensor, lse: Tensor, num_ranks: int, num_layers: int) -> Tensor:
    """``num_layers`` exchanges in one graph, each fed by the one before."""
    for layer in range(num_layers):
        out = packed(o * (1 + layer), lse + layer, num_ranks)
        o = o + out.repeat(1, num_ranks, 1)
    return o
