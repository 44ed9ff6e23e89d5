"""Backend ``collective``: pack, one all-to-all of bytes, merge. Runs on any group.

It needs no workspace and is what every other backend is held against. Speed stays with
the other backends.

What travels to one peer, all in one message:

    | partial_o of the peer's heads, [B, h, D] | pad to 16 | partial_lse, [B, h] fp32 |
"""

from __future__ import annotations

from typing import NoReturn

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from dcp_inductor.merge import merge
from dcp_inductor.runtime.call import ExchangeCall, Geometry

_ALIGNMENT = 16
_LSE_BYTES = 4


class Collective:
    """Exchange through ``torch.distributed.all_to_all_single`` (gloo, NCCL)."""

    name = "collective"
    needs_buffers = False

    def unavailable(self, group: ProcessGroup, device: torch.device) -> str | None:
        """None: the group that the caller computes with can always exchange bytes."""
        del group, device
        return None

    def declines(self, geometry: Geometry) -> str | None:
        """None: any geometry is bytes."""
        del geometry
        return None

    def allocate(
        self, group: ProcessGroup, geometry: Geometry, device: torch.device
    ) -> NoReturn:
        """Never called: this backend keeps nothing between calls."""
        raise AssertionError("the collective backend has no buffers")

    def run_direct(self, call: ExchangeCall) -> tuple[Tensor, Tensor]:
        """Two copies, one all-to-all and the merge of merge.py."""
        n, b, h = call.cp_size, call.num_tokens, call.heads_per_rank
        o_shape = (n, b, h, call.partial_o.shape[2])
        send_o = call.partial_o.unflatten(1, (n, h)).transpose(0, 1)
        send_lse = call.partial_lse.unflatten(1, (n, h)).transpose(0, 1)
        sent = _message(call.partial_o, o_shape)
        received = torch.empty_like(sent)
        o_part, lse_part = _parts(sent, o_shape, call.partial_o.dtype)
        o_part.copy_(send_o)
        lse_part.copy_(send_lse)
        dist.all_to_all_single(received, sent, group=call.group)
        return merge(
            *_parts(received, o_shape, call.partial_o.dtype), lse_mode=call.lse_mode
        )


def _o_bytes(o_shape: tuple[int, int, int, int], dtype: torch.dtype) -> int:
    _, b, h, d = o_shape
    return b * h * d * dtype.itemsize


def _lse_offset(o_shape: tuple[int, int, int, int], dtype: torch.dtype) -> int:
    return -(-_o_bytes(o_shape, dtype) // _ALIGNMENT) * _ALIGNMENT


def _message(like: Tensor, o_shape: tuple[int, int, int, int]) -> Tensor:
    """A buffer ``[N, bytes to one peer]``, zeroed so that the pad is defined."""
    n, b, h, _ = o_shape
    lse_bytes = -(-b * h * _LSE_BYTES // _ALIGNMENT) * _ALIGNMENT
    row_bytes = _lse_offset(o_shape, like.dtype) + lse_bytes
    return torch.zeros((n, row_bytes), dtype=torch.uint8, device=like.device)


def _parts(
    message: Tensor, o_shape: tuple[int, int, int, int], dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """The message's two parts as views: ``[N, B, h, D]`` and ``[N, B, h]`` fp32."""
    offset = _lse_offset(o_shape, dtype)
    lse_bytes = o_shape[1] * o_shape[2] * _LSE_BYTES
    o_part = message[:, : _o_bytes(o_shape, dtype)].view(dtype)
    lse_part = message[:, offset : offset + lse_bytes].view(torch.float32)
    return o_part.unflatten(1, o_shape[1:]), lse_part.unflatten(1, o_shape[1:3])
