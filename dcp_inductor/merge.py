"""The meaning of the exchange: the LSE-weighted merge of N partial attentions.

Every backend, every proof and every test is measured against this file. Moving data
between ranks stays with the caller: here all N partials lie in one process.

Axes: N ranks, B tokens, H heads before the exchange, h = H / N after it, D head dim.

NOTE [merge rule]
Rank r attended over its shard of the KV cache and holds ``o_r`` and
``l_r = log(sum(exp(scores)))`` in base e or base 2. With ``m = max_r l_r`` and
``w_r = base ** (l_r - m)``:

    out = sum_r(w_r * o_r) / sum_r(w_r)        lse = m + log_base(sum_r(w_r))

- A shard without a token is empty: its LSE is -inf. Kernels also mark it with +inf
  (FlashAttention 2) or NaN; both count as -inf.
- A partial of weight 0 is *selected* out, never multiplied: the output of an empty
  shard may be uninitialised memory, and 0 * NaN is NaN.
- All shards empty: out = 0, lse = -inf.
- Sums are accumulated in fp32 (fp64 for fp64 partials) and rounded once.
- A finite sentinel such as -1e30 isn't empty: two of them average.
"""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor

from dcp_inductor.errors import BadInput

PARTIAL_DTYPES = (
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
)
LseMode = Literal["base2", "basee"]
LSE_MODES: tuple[LseMode, ...] = get_args(LseMode)


def check_lse_mode(lse_mode: str) -> None:
    """Raise BadInput unless ``lse_mode`` is one of ``LSE_MODES``."""
    if lse_mode not in LSE_MODES:
        raise BadInput(
            f"lse_mode={lse_mode!r} is unknown. The log-sum-exp is either in base 2 "
            "(FlashInfer, Triton kernels) or base e (FlashAttention, FlashMLA): pass "
            "lse_mode='base2' or lse_mode='basee'."
        )


def merge(
    partial_o: Tensor, partial_lse: Tensor, *, lse_mode: LseMode
) -> tuple[Tensor, Tensor]:
    """Merge N partial attention outputs by their LSE.

    partial_o: ``[N, ..., D]``, any floating dtype. partial_lse: ``[N, ...]`` fp32 (or
    fp64), in the base that ``lse_mode`` names. Returns ``(out [..., D]`` in the dtype
    of partial_o, ``lse [...]`` in the dtype of partial_lse, same base). Raises
    BadInput on an unknown lse_mode or shapes that don't pair up. Rule:
    NOTE [merge rule].
    """
    check_lse_mode(lse_mode)
    if partial_o.shape[:-1] != partial_lse.shape:
        raise BadInput(
            f"partial_o has shape {tuple(partial_o.shape)} and partial_lse "
            f"{tuple(partial_lse.shape)}: one LSE belongs to each row of partial_o, so "
            "partial_lse must have the shape of partial_o without its last axis."
        )
    wide = torch.float64 if partial_o.dtype == torch.float64 else torch.float32
    weight, lse = _weights(partial_lse.to(wide), lse_mode)
    kept = torch.where(weight.unsqueeze(-1) > 0, partial_o.to(wide), 0.0)
    total = weight.sum(0)
    out = (weight.unsqueeze(-1) * kept).sum(0) / torch.where(
        total > 0, total, 1.0
    ).unsqueeze(-1)
    return out.to(partial_o.dtype), lse.to(partial_lse.dtype)


def _weights(lse: Tensor, lse_mode: LseMode) -> tuple[Tensor, Tensor]:
    """Weights ``[N, ...]`` in (0, 1] or 0 where empty, and the merged LSE ``[...]``."""
    exp, log = (
        (torch.exp2, torch.log2) if lse_mode == "base2" else (torch.exp, torch.log)
    )
    empty = torch.isnan(lse) | (lse == torch.inf)
    lse = torch.where(empty, -torch.inf, lse)
    top = lse.amax(0)
    shift = torch.where(top == -torch.inf, 0.0, top)
    weight = exp(lse - shift)
    return weight, shift + log(weight.sum(0))


def head_slice(tensor: Tensor, rank: int, cp_size: int, dim: int) -> Tensor:
    """The heads that ``rank`` keeps: ``rank * H/N`` up to ``(rank + 1) * H/N``."""
    heads = tensor.shape[dim] // cp_size
    return tensor.narrow(dim, rank * heads, heads)


def a2a_lse_reduce_reference(
    partial_o: Tensor, partial_lse: Tensor, *, rank: int, lse_mode: LseMode
) -> tuple[Tensor, Tensor]:
    """What rank ``rank`` must get from the exchange, all partials in one place.

    partial_o ``[N, B, H, D]`` and partial_lse ``[N, B, H]`` hold the partials of all N
    ranks. Returns ``([B, H/N, D], [B, H/N])``.
    """
    cp_size = partial_o.shape[0]
    return merge(
        head_slice(partial_o, rank, cp_size, dim=2),
        head_slice(partial_lse, rank, cp_size, dim=2),
        lse_mode=lse_mode,
    )
