"""Backend ``collective``: pack, one all-to-all of bytes, merge. Runs on any group.

It needs no workspace and is what every other backend is held against. Speed stays with
the other backends.

What travels to one peer, all in one message:

    | tag, 16 bytes | partial_o, [B, h, D], padded to 16 | partial_lse, [B, h] fp32 |

NOTE [tag]
The tag says which call the message is of. On the host a roll call has settled that
before (rollcall.py); on a device, where the host doesn't wait, a result made of another
call's message is NaN throughout. Ranks whose batches differ send messages of different
sizes, which the group's own collective stops or not: NCCL waits for its own timeout.
"""

from __future__ import annotations

from typing import NoReturn

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from dcp_inductor.merge import merge
from dcp_inductor.runtime.call import ExchangeCall, Geometry, tag_of

_ALIGNMENT = 16
_TAG_BYTES = _ALIGNMENT
_LSE_BYTES = 4


class Collective:
    """Exchange through ``torch.distributed.all_to_all_single`` (gloo, NCCL)."""

    name = "collective"
    needs_buffers = False

    def unavailable(
        self, group: ProcessGroup | None, device: torch.device
    ) -> str | None:
        """None: the group that the caller computes with can always exchange bytes."""
        del group, device
        return None

    def identity(self) -> str:
        """Empty: all of it is in this library, whose sources are agreed on."""
        return ""

    def only_if_asked(self) -> str | None:
        """None: it is what is left when nothing else runs."""
        return None

    def declines(self, geometry: Geometry) -> str | None:
        """None: any geometry is bytes."""
        del geometry
        return None

    def slot_bytes(self, geometry: Geometry) -> int:
        """0: messages are made for each call and given back."""
        del geometry
        return 0

    def allocate(
        self, group: ProcessGroup, geometry: Geometry, device: torch.device
    ) -> NoReturn:
        """Never called: this backend keeps nothing between calls."""
        raise AssertionError("the collective backend has no buffers")

    def run_direct(self, call: ExchangeCall) -> tuple[Tensor, Tensor]:
        """Two copies, one all-to-all and the merge of merge.py. Never waits for a
        device; NOTE [tag] says what becomes of calls that pair wrongly."""
        sent = _packed(call)
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=call.group)
        return _merged(call, sent, received)


def _o_shape(call: ExchangeCall) -> tuple[int, int, int, int]:
    """``[N, B, h, D]`` of the payload."""
    head_dim = call.partial_o.shape[2]
    return call.cp_size, call.num_tokens, call.heads_per_rank, head_dim


def _packed(call: ExchangeCall) -> Tensor:
    """The messages to all ranks, ``[N, bytes]``."""
    shape = _o_shape(call)
    heads = (shape[0], shape[2])
    sent = _message(call.partial_o, shape)
    o_part, lse_part = _parts(sent, shape, call.partial_o.dtype)
    o_part.copy_(call.partial_o.unflatten(1, heads).transpose(0, 1))
    lse_part.copy_(call.partial_lse.unflatten(1, heads).transpose(0, 1))
    kind = *call.partial_o.shape, call.lse_mode
    tag = tag_of(call.site, call.caller, call.instance, *kind)
    sent[:, :_TAG_BYTES].view(torch.int64).fill_(tag)
    return sent


def _merged(
    call: ExchangeCall, sent: Tensor, received: Tensor
) -> tuple[Tensor, Tensor]:
    """The merge of all ranks' messages to this one, ``[N, bytes]``."""
    parts = _parts(received, _o_shape(call), call.partial_o.dtype)
    return _nan_if_mixed(sent, received, merge(*parts, lse_mode=call.lse_mode))


def _nan_if_mixed(
    sent: Tensor, received: Tensor, merged: tuple[Tensor, Tensor]
) -> tuple[Tensor, Tensor]:
    """``merged``, all NaN if any message is of another call: NOTE [tag]. In place."""
    mixed = (received[:, :_TAG_BYTES] != sent[:, :_TAG_BYTES]).any()
    for result in merged:
        # All bits set are a NaN of every dtype, also of those that can't be filled.
        result.view(torch.uint8).masked_fill_(mixed, 0xFF)
    return merged


def _o_bytes(o_shape: tuple[int, int, int, int], dtype: torch.dtype) -> int:
    _, b, h, d = o_shape
    return b * h * d * dtype.itemsize


def _lse_offset(o_shape: tuple[int, int, int, int], dtype: torch.dtype) -> int:
    return _TAG_BYTES + -(-_o_bytes(o_shape, dtype) // _ALIGNMENT) * _ALIGNMENT


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
    o_bytes = _o_bytes(o_shape, dtype)
    o_part = message[:, _TAG_BYTES : _TAG_BYTES + o_bytes].view(dtype)
    lse_part = message[:, offset : offset + lse_bytes].view(torch.float32)
    return o_part.unflatten(1, o_shape[1:]), lse_part.unflatten(1, o_shape[1:3])
