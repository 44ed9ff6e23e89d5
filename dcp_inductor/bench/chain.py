"""The exchange in plain torch, as a model would spell it, to hold the pass against.

B tokens, H heads before the exchange, N ranks, D head dim.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed._functional_collectives import all_to_all_single


def chain(o: Tensor, lse: Tensor, n: int, group: str) -> Tensor:
    """``[B, H, D]`` and ``[B, H]`` fp32 to ``[B, H/N, D]``.

    Payload bits, then LSE bits, to each peer in one all-to-all; merge in base 2,
    guarded against empty shards.
    """
    b, h, d = o.shape
    shape = (n, b, h // n)
    o_parts = o.view(b, n, h // n, d).transpose(0, 1).reshape(n, -1)
    lse_parts = lse.view(b, n, h // n).transpose(0, 1).reshape(n, -1)
    sent = torch.cat([o_parts, lse_parts.view(o.dtype)], 1)
    received = all_to_all_single(sent, None, None, group)  # type: ignore[arg-type]
    payload = b * (h // n) * d
    got_o = received[:, :payload].reshape(*shape, d).float()
    got_lse = received[:, payload:].contiguous().view(torch.float32).view(*shape, 1)
    top = got_lse.amax(0, keepdim=True)
    top = torch.where(top == -torch.inf, torch.zeros_like(top), top)
    weight = torch.exp2(got_lse - top)
    return ((got_o * weight).sum(0) / weight.sum(0).clamp(min=1.0)).to(o.dtype)
