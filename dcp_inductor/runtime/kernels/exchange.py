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
import triton
import triton.language as tl
from torch import Tensor

from dcp_inductor.errors import BackendUnavailable
from dcp_inductor.merge import LseMode
from dcp_inductor.runtime.kernels import (
    MAX_RANKS,
    PAYLOAD_SENTINEL,
    TAG_MASK,
    KernelShape,
    SlotGeometry,
)
from dcp_inductor.runtime.kernels.protocol import exchange_kernel
from dcp_inductor.runtime.kernels.words import INTERPRETED, await_assembly

_TRITON_DTYPES = {
    torch.float32: tl.float32,
    torch.float16: tl.float16,
    torch.bfloat16: tl.bfloat16,
    torch.float8_e4m3fn: tl.float8e4nv,
    torch.float8_e5m2: tl.float8e5,
}
_WORD_LIMIT = 1 << 31
# Compute capability of programmatic dependent launch: NOTE [early launch].
_DEPENDENT_SINCE = (9, 0)
# What an LSE is multiplied by to be in base 2.
_TO_LOG2: dict[LseMode, float] = {"base2": 1.0, "basee": math.log2(math.e)}


class Launch:
    """One call prepared: all that calls of one shape on one slot have in common.

    partial_o: ``[B, H, D]``, any strides. partial_lse: ``[B, H]`` fp32, any strides.
    Both stand for all partials of their sizes, strides, device, and address modulo 16.
    B is at least 1. What the kernel can't address as it is, each call copies: a row
    starts at a whole vector and has unit stride, and byte strides have 32 bits. A copy
    changes nothing on the wire, so each rank decides for itself.
    peers: int64 ``[N]`` on the device, the addresses of all ranks' initialised buffers.
    epochs: int32 ``[geometry.rows]`` on the device, zero at first.
    status: int32 ``[4]`` on the device or pinned, zero at first, for read_failure().
    All these belong to one slot, as does ``rank``; one ordered stream uses a slot. Only
    their addresses are kept: the caller keeps them alive.
    spin_limit_ns: how long a program polls before it gives up; polls under Triton's
    interpreter. max_programs: NOTE [one row ahead]; see resident_programs().

    After a failure the rows concerned are NaN and ``status`` isn't zero. The slot is
    spoilt then: programs give up at their first check, the buffers hold unread or late
    messages, and epochs may differ between ranks. Don't launch on it again; it can only
    be made anew, by all ranks: initialise(), zero epochs and status, meet.
    """

    def __init__(
        self,
        partial_o: Tensor,
        partial_lse: Tensor,
        *,
        peers: Tensor,
        epochs: Tensor,
        status: Tensor,
        geometry: SlotGeometry,
        rank: int,
        lse_mode: LseMode,
        spin_limit_ns: int,
        max_programs: int,
    ) -> None:
        tokens, all_heads, _ = partial_o.shape
        heads = all_heads // geometry.cp_size
        assert 0 < tokens * heads <= geometry.rows, (tokens, all_heads, geometry)
        assert partial_o.dtype == geometry.dtype, (partial_o.dtype, geometry)
        shape = geometry.shape
        self.copies_o = not _reachable(partial_o, shape.vector_bytes)
        if self.copies_o:
            partial_o = _dense(partial_o)
        self.copies_lse = not _reachable(partial_lse[..., None], partial_lse.itemsize)
        if self.copies_lse:
            partial_lse = _dense(partial_lse)
        o_token, o_head, _ = partial_o.stride()
        lse_token, lse_head = partial_lse.stride()
        kernel, constants = _loaded(shape, partial_o.get_device())
        columns = min(heads, max_programs)
        self.run = kernel[(columns, min(tokens, max_programs // columns), 1)]
        self.first = (
            o_token * partial_o.itemsize,
            o_head * partial_o.itemsize,
            lse_token * partial_lse.itemsize,
            lse_head * partial_lse.itemsize,
            tokens,
            heads,
            peers.data_ptr(),
            epochs.data_ptr(),
            status.data_ptr(),
            geometry.rows,
            geometry.lse_offset,
            rank,
        )
        self.last = (spin_limit_ns, _TO_LOG2[lse_mode], *constants)

    def __call__(
        self,
        partial_o: Tensor,
        partial_lse: Tensor,
        out: Tensor,
        out_lse: Tensor | None,
        tag: int,
        **stream: int,
    ) -> None:
        """Launch on the current device, on its current stream or the raw ``stream``.

        out: ``[B, H/N, D]`` contiguous, 16-byte aligned. out_lse: ``[B, H/N]`` fp32
        contiguous, or None. tag: what all ranks' matching calls have in common; its low
        31 bits are compared.
        """
        if self.copies_o:
            partial_o = _dense(partial_o)
        if self.copies_lse:
            partial_lse = _dense(partial_lse)
        self.run(
            partial_o.data_ptr(),
            partial_lse.data_ptr(),
            out.data_ptr(),
            0 if out_lse is None else out_lse.data_ptr(),
            *self.first,
            tag & TAG_MASK,
            *self.last,
            **stream,
        )


def _dense(partials: Tensor) -> Tensor:
    """A copy. ``contiguous`` would leave the stride of an axis of size 1 as it is."""
    return partials.clone(memory_format=torch.contiguous_format)


def _reachable(rows: Tensor, vector_bytes: int) -> bool:
    """Whether the kernel can address ``rows [B, H, D]`` as they are."""
    token, head, element = rows.stride()
    strides = token * rows.itemsize, head * rows.itemsize
    starts = (*strides, rows.data_ptr())
    aligned = all(start % vector_bytes == 0 for start in starts)
    return element == 1 and aligned and max(strides) < _WORD_LIMIT


def _constants(shape: KernelShape, dependent: bool) -> tuple[Any, ...]:
    """The constant arguments of the kernel, in its order."""
    wide = shape.vector_bytes == 16
    sentinel = PAYLOAD_SENTINEL[shape.dtype]
    return (
        shape.cp_size,
        shape.others_pad,
        shape.vectors,
        shape.block,
        shape.vector_bytes,
        _TRITON_DTYPES[shape.dtype],
        sentinel,
        *await_assembly(shape.awaited, wide, sentinel),
        shape.awaited,
        dependent,
    )


@cache
def _loaded(shape: KernelShape, device_index: int) -> tuple[Any, tuple[Any, ...]]:
    """The variant of ``shape``, loaded by a launch of no rows, and its constants."""
    if INTERPRETED:
        return exchange_kernel, _constants(shape, dependent=False)
    dependent = torch.cuda.get_device_capability(device_index) >= _DEPENDENT_SINCE
    constants = _constants(shape, dependent)
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
            launch_pdl=dependent,
        )
        torch.cuda.synchronize()
    _check_copies(kernel.asm["ptx"], shape)
    return kernel, constants


def _check_copies(ptx: str, shape: KernelShape) -> None:
    """Raise BackendUnavailable if the compiler copied an access: NOTE [read once].

    A copied wait reads what a peer overwrites, a copied store writes over what a peer
    has cleared. Stores: payload, header, their clearing and a fault's record for each
    peer, the merged row and its LSE.
    """
    peers = shape.others_pad
    expected = {"bar.red": peers // shape.awaited, "st.relaxed.sys": 5 * peers + 2}
    found = {text: ptx.count(text) for text in expected}
    if found != expected:
        raise BackendUnavailable(
            f"Triton {triton.__version__} compiled the exchange kernel for {shape} "
            f"with {found} instead of {expected}: it copied an access that must happen "
            "once. Use another Triton, or Config(backend='collective')."
        )


def warm_up(geometry: SlotGeometry, device: torch.device) -> None:
    """Compile and load the one variant of ``geometry``; NOTE [one variant].

    Waits for the device: call it when nothing on it waits for a peer, before the first
    launch and outside of a capture. No peer is needed.
    """
    _loaded(geometry.shape, _index(device))


def resident_programs(geometry: SlotGeometry, device: torch.device) -> int:
    """How many programs fit on an idle ``device`` at once, loading the variant.

    A lower bound from registers, which lie in four parts, threads and shared memory, at
    most 16 a multiprocessor. Slots that may be in use at the same time must share it.
    """
    kernel, _ = _loaded(geometry.shape, _index(device))
    card = torch.cuda.get_device_properties(device)
    warps = geometry.shape.num_warps
    warp_registers = -(-kernel.n_regs * 32 // 256) * 256
    fits = min(
        16,
        card.regs_per_multiprocessor  # type: ignore[attr-defined]
        // 4
        // warp_registers
        * 4
        // warps,
        card.max_threads_per_multi_processor // (32 * warps),
        card.shared_memory_per_multiprocessor // (kernel.metadata.shared + 2048),
    )
    return max(1, fits) * card.multi_processor_count


def _index(device: torch.device) -> int:
    """The device's number, for "cuda" without one the current device's."""
    return torch.cuda.current_device() if device.index is None else device.index
