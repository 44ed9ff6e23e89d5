"""DCP's exchange as a model spells it: pack, one all-to-all, merge. Plain PyTorch.

Nothing here knows of dcp_inductor; the pass has to find this in the compiled graph.

Axes: N ranks, B tokens, H heads before the exchange, h = H / N after it, D head dim.
What travels to one peer for each token and head, in bytes:

    | partial_o, D elements | partial_lse, one fp32 |
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

LSE_BYTES = 4
_EXP = {"basee": torch.exp, "base2": torch.exp2}


def exchange(
    partial_o: Tensor, partial_lse: Tensor, num_ranks: int, lse_mode: str
) -> Tensor:
    """This rank's heads, merged over the shards of all ranks of the default group.

    partial_o ``[B, H, D]``, partial_lse ``[B, H]`` fp32 in the base of lse_mode;
    returns ``[B, H/N, D]`` in the dtype of partial_o. One rank exchanges nothing.
    """
    if num_ranks == 1:
        return partial_o
    packed = _pack(partial_o, partial_lse, num_ranks)
    received = torch.empty_like(packed)
    dist.all_to_all_single(received, packed)
    received_o = received[..., :-LSE_BYTES].view(partial_o.dtype)
    received_lse = received[..., -LSE_BYTES:].view(torch.float32).squeeze(-1)
    return _merge(received_o, received_lse, lse_mode)


def _pack(partial_o: Tensor, partial_lse: Tensor, num_ranks: int) -> Tensor:
    """Bytes ``[N, B, h, D * itemsize + 4]``: first the rank that gets the heads."""
    payload = partial_o.view(torch.uint8)
    lse = partial_lse.view(torch.uint8).unflatten(1, (-1, LSE_BYTES))
    packed = torch.cat([payload, lse], dim=-1)
    return packed.unflatten(1, (num_ranks, -1)).transpose(0, 1).contiguous()


def _merge(partial_o: Tensor, partial_lse: Tensor, lse_mode: str) -> Tensor:
    """Mean of ``[N, B, h, D]`` over N, weighted by the LSE ``[N, B, h]``; in fp32."""
    largest = partial_lse.amax(0)
    weight = _EXP[lse_mode](partial_lse - largest).unsqueeze(-1)
    merged = (weight * partial_o.float()).sum(0) / weight.sum(0)
    return merged.to(partial_o.dtype)
