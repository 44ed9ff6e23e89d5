"""Attention over one shard of the KV cache, and DCP's exchange, in plain torch.

Nothing here knows of transformers or of the pass, which has to find the exchange in
the compiled graph. What is attended over, and by which rank, stays with the caller.

Axes: B sequences, H query heads, K key-value heads (H = K * G), Q new tokens, S slots
of a shard or tokens of a sequence, E elements of a key, D elements of a value, N ranks,
h = H / N heads after the exchange. LSEs are fp32 in base e.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

# torch 2.14 has a new name for it, and warns at the old one.
_all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)

# query, key, value, mask, scaling, softcap -> partial output, its LSE
Attend = Callable[
    [Tensor, Tensor, Tensor, Tensor, float, float | None], tuple[Tensor, Tensor]
]


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor,
    scaling: float,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Softmax attention and the LSE of its scores, all scores in memory.

    query ``[B, H, Q, E]``, key ``[B, K, S, E]``, value ``[B, K, S, D]``, mask bool,
    broadcastable to ``[B, H, Q, S]``, True where a token is seen. softcap: scores are
    ``softcap * tanh(score / softcap)``. Returns ``[B, H, Q, D]`` in the dtype of value
    and ``[B, H, Q]`` fp32; a row that sees no token gives 0 and -inf.
    """
    batch, heads, length, _ = query.shape
    # Heads of one group lie beside each other: they share their key as further rows.
    grouped = query.reshape(batch, key.shape[1], -1, query.shape[-1])
    scores = (grouped @ key.transpose(2, 3)).float() * scaling
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    scores = scores.reshape(batch, heads, length, -1).masked_fill(~mask, -torch.inf)
    top = scores.amax(-1, keepdim=True)
    top = torch.where(top == -torch.inf, torch.zeros_like(top), top)
    weight = torch.exp(scores - top)
    total = weight.sum(-1, keepdim=True)
    share = weight / torch.where(total == 0, torch.ones_like(total), total)
    share = share.to(value.dtype).reshape(batch, key.shape[1], -1, key.shape[2])
    partial_o = (share @ value).reshape(batch, heads, length, -1)
    return partial_o, (top + torch.log(total)).squeeze(-1)


def with_sinks(
    partial_o: Tensor, partial_lse: Tensor, sinks: Tensor
) -> tuple[Tensor, Tensor]:
    """The same attention with one more score a head, whose value is 0.

    partial_o ``[B, H, Q, D]``, partial_lse ``[B, H, Q]``, sinks broadcastable to it;
    -inf is no sink. A sink belongs to the whole softmax, so of the N shards exactly
    one may get it.
    """
    lse = torch.logaddexp(partial_lse, sinks)
    kept = torch.where(lse == -torch.inf, 0.0, torch.exp(partial_lse - lse))
    return (partial_o.float() * kept.unsqueeze(-1)).to(partial_o.dtype), lse


def exchange(partial_o: Tensor, partial_lse: Tensor, group: ProcessGroup) -> Tensor:
    """This rank's heads, merged over the shards of all ranks: DCP's exchange.

    partial_o ``[B, H, D]`` of 4 bytes an element or fewer, partial_lse ``[B, H]``;
    returns ``[B, h, D]``, heads ``rank * h`` and up. One all-to-all carries to each
    peer its heads' payload, and behind that the bits of their LSEs. A head that no
    shard has a token for is 0. One rank exchanges nothing.
    """
    num_ranks = group.size()
    if num_ranks == 1:
        return partial_o
    batch, heads, head_dim = partial_o.shape
    local = (batch, num_ranks, heads // num_ranks)
    payload = partial_o.reshape(*local, head_dim).transpose(0, 1).reshape(num_ranks, -1)
    lse = partial_lse.reshape(local).transpose(0, 1).reshape(num_ranks, -1)
    packed = torch.cat([payload, lse.view(partial_o.dtype)], dim=1)
    received = torch.empty_like(packed)
    dist.all_to_all_single(received, packed, group=group)
    shape = (num_ranks, batch, heads // num_ranks)
    got_o = received[:, : payload.shape[1]].reshape(*shape, head_dim)
    got_lse = received[:, payload.shape[1] :].contiguous().view(torch.float32)
    return _merge(got_o, got_lse.view(*shape, 1))


def _merge(partial_o: Tensor, partial_lse: Tensor) -> Tensor:
    """Mean of ``[N, B, h, D]`` over N, weighted by LSEs ``[N, B, h, 1]``; in fp32."""
    top = partial_lse.amax(0, keepdim=True)
    top = torch.where(top == -torch.inf, torch.zeros_like(top), top)
    weight = torch.exp(partial_lse - top)
    total = weight.sum(0).clamp(min=1.0)
    return ((partial_o.float() * weight).sum(0) / total).to(partial_o.dtype)


def all_heads(own: Tensor, group: ProcessGroup) -> Tensor:
    """``[B, h, D]`` of each rank, together: ``[B, H, D]`` on every rank."""
    num_ranks = group.size()
    if num_ranks == 1:
        return own
    return gathered(own, group).transpose(0, 1).flatten(1, 2)


def gathered(own: Tensor, group: ProcessGroup) -> Tensor:
    """``[B, ..]`` of each rank, of any strides, in order of ranks: ``[N, B, ..]``."""
    received = own.new_empty((group.size() * own.shape[0], *own.shape[1:]))
    _all_gather(received, own.contiguous(), group=group)
    return received.unflatten(0, (group.size(), -1))
