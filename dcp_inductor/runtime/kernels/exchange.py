"""The fused exchange from the host: launch it, load it, count what fits on a card.

Workspaces, the order of calls on a slot, and raising for a spoilt slot stay with the
caller. The kernel is in protocol.py; axes and buffer layout in the package's __init__.

NOTE [one variant]
Everything but the KernelShape is a run-time argument without specialisation: addresses,
strides, batch, rank, base of the LSE. A variant that appeared late would be loaded in
the middle of a call, and loading waits for a device that waits for a peer. warm_up()
loads the one variant of a geometry.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from dcp_inductor.merge import LseMode
from dcp_inductor.runtime.kernels import (
    MAX_RANKS,
    PAYLOAD_SENTINEL,
    TAG_MASK,
    KernelShape,
    SlotGeometry,
)
from dcp_inductor.runtime.kernels.protocol import exchange_kernel
from dcp_inductor.runtime.kernels.words import INTERPRETED

_TRITON_DTYPES = {
    torch.float32: tl.float32,
    torch.float16: tl.float16,
    torch.bfloat16: tl.bfloat16,
    torch.float8_e4m3fn: tl.float8e4nv,
    torch.float8_e5m2: tl.float8e5,
}
# What an LSE is multiplied by to be in base 2.
_TO_LOG2: dict[LseMode, float] = {"base2": 1.0, "basee": math.log2(math.e)}


def launch(
    partial_o: Tensor,
    partial_lse: Tensor,
    out: Tensor,
    out_lse: Tensor | None,
    *,
    peers: Tensor,
    epochs: Tensor,
    status: Tensor,
    geometry: SlotGeometry,
    rank: int,
    lse_mode: LseMode,
    tag: int,
    spin_limit_ns: int,
    max_programs: int,
) -> None:
    """Launch one exchange on the current stream of the current device.

    partial_o: ``[B, H, D]``, any strides on B and H. partial_lse: ``[B, H]`` fp32, any
    strides. out: ``[B, h, D]`` contiguous, 16-byte aligned. out_lse: ``[B, h]`` fp32
    contiguous, or None. B is at least 1.
    peers: int64 ``[N]`` on the device, the addresses of all ranks' initialised buffers.
    epochs: int32 ``[geometry.rows]`` on the device, zero at first.
    status: int32 ``[4]`` on the device or pinned, zero at first, for read_failure().
    All these belong to one slot, as does ``rank``; one ordered stream uses a slot.
    tag: what all ranks' matching calls have in common; its low 31 bits are compared.
    spin_limit_ns: how long a program polls before it gives up; polls under Triton's
    interpreter. max_programs: NOTE [no residency]; see resident_programs().

    After a failure the rows concerned are NaN and ``status`` isn't zero. The slot is
    spoilt then: programs give up at their first check, the buffers hold unread or late
    messages, and epochs may differ between ranks. Don't launch on it again; it can only
    be made anew, by all ranks: initialise(), zero epochs and status, meet.
    """
    tokens, all_heads, _ = partial_o.shape
    heads = all_heads // geometry.cp_size
    rows = tokens * heads
    shape = geometry.shape
    assert 0 < rows <= geometry.rows, (tokens, all_heads, geometry)
    assert partial_o.dtype == geometry.dtype, (partial_o.dtype, geometry)
    assert out.is_contiguous(), out.stride()
    partial_o = _aligned(partial_o, shape.vector_bytes)
    o_token, o_head, _ = partial_o.stride()
    lse_token, lse_head = partial_lse.stride()
    itemsize = geometry.dtype.itemsize
    kernel, constants = _loaded(shape, out.get_device())
    kernel[(min(rows, max_programs), 1, 1)](
        partial_o.data_ptr(),
        partial_lse.data_ptr(),
        out.data_ptr(),
        0 if out_lse is None else out_lse.data_ptr(),
        o_token * itemsize,
        o_head * itemsize,
        lse_token * 4,
        lse_head * 4,
        rows,
        heads,
        peers.data_ptr(),
        epochs.data_ptr(),
        status.data_ptr(),
        geometry.rows,
        geometry.lse_offset,
        rank,
        tag & TAG_MASK,
        spin_limit_ns,
        _TO_LOG2[lse_mode],
        *constants,
    )


def _aligned(partial_o: Tensor, vector_bytes: int) -> Tensor:
    """partial_o itself, or a dense copy where a row doesn't start at a whole vector.

    The copy changes nothing on the wire, so each rank decides for itself.
    """
    o_token, o_head, o_dim = partial_o.stride()
    offsets = partial_o.data_ptr() | (o_token | o_head) * partial_o.itemsize
    if offsets % vector_bytes or o_dim != 1:
        return partial_o.clone(memory_format=torch.contiguous_format)
    return partial_o


def _constants(shape: KernelShape) -> tuple[Any, ...]:
    """The constant arguments of the kernel, in its order."""
    return (
        shape.cp_size,
        shape.cp_pad,
        shape.vectors,
        shape.block,
        shape.vector_bytes,
        _TRITON_DTYPES[shape.dtype],
        PAYLOAD_SENTINEL[shape.dtype],
    )


@cache
def _loaded(shape: KernelShape, device_index: int) -> tuple[Any, tuple[Any, ...]]:
    """The variant of ``shape``, loaded by a launch of no rows, and its constants."""
    constants = _constants(shape)
    if INTERPRETED:
        return exchange_kernel, constants
    with torch.cuda.device(device_index):
        nothing = torch.zeros(MAX_RANKS, dtype=torch.int64, device="cuda")
        kernel = exchange_kernel[(1, 1, 1)](
            *(nothing.data_ptr(),) * 4,
            *(0,) * 6,
            *(nothing.data_ptr(),) * 3,
            *(0,) * 5,
            1.0,
            *constants,
            num_warps=shape.num_warps,
        )
        torch.cuda.synchronize()
    return kernel, constants


def warm_up(geometry: SlotGeometry, device: torch.device) -> None:
    """Compile and load the one variant of ``geometry``; NOTE [one variant].

    Waits for the device: call it when nothing on it waits for a peer, before the first
    launch and outside of a capture. No peer is needed.
    """
    _loaded(geometry.shape, _index(device))


def resident_programs(geometry: SlotGeometry, device: torch.device) -> int:
    """How many programs fit on an idle ``device`` at once, loading the variant.

    A lower bound from registers, threads and shared memory, at most 16 a
    multiprocessor. Slots that may be in use at the same time must share it.
    """
    kernel, _ = _loaded(geometry.shape, _index(device))
    card = torch.cuda.get_device_properties(device)
    warps = geometry.shape.num_warps
    warp_registers = -(-kernel.n_regs * 32 // 256) * 256
    fits = min(
        16,
        card.regs_per_multiprocessor  # type: ignore[attr-defined]
        // (warp_registers * warps),
        card.max_threads_per_multi_processor // (32 * warps),
        card.shared_memory_per_multiprocessor // (kernel.metadata.shared + 2048),
    )
    return max(1, fits) * card.multi_processor_count


def _index(device: torch.device) -> int:
    """The device's number, for "cuda" without one the current device's."""
    return torch.cuda.current_device() if device.index is None else device.index
