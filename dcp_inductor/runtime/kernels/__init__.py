"""What a workspace slot of the symmetric-memory kernel looks like, and what it takes.

Plain Python and torch, no Triton: planning needs no GPU. Allocating, exchanging and
freeing the buffers stays with the caller; the kernel itself is in protocol.py.

Axes: N ranks (cp_size), B tokens, H heads before the exchange, h = H / N after it,
D head dim. A *row* is one (token, local head) pair, ``token * h + head``; a slot holds
``rows`` of them. A *word* is 32 bits, a *vector* is what one thread moves at once.

One rank's buffer, all of it little-endian 32-bit words:

    payload   [2 phases][N sources][rows][D * itemsize bytes]
    headers   [2 phases][N sources][rows][2]         LSE (fp32 bits), tag (31 bits)

NOTE [sentinel word]
An empty word holds a pattern that is never sent, so data needs no flag beside it.

- Payload: the word whose elements are all negative zero (0x80000000 fp32, 0x80008000
  fp16 and bf16, 0x80808080 float8; both float8 formats have 0x80 = -0). The sender
  replaces a word that equals it by the word of positive zeros: equal in value, and no
  other word is touched. So a received word is the sentinel if and only if it hasn't
  come yet. A word of one negative zero and one other element is sent as it is.
- LSE: -0.0, sent as +0.0. Bits are compared, not numbers, so NaN and inf pass.
- Tag: 0x80000000; the tag that is sent has 31 bits.

Every word validates itself because naturally aligned 32-bit accesses are single-copy
atomic: a vector access is its words in any order, and a word is either old or new.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor

PHASES = 2
WORD_BYTES = 4
HEADER_BYTES = 2 * WORD_BYTES
HEADER_SENTINEL = -(1 << 31)
TAG_MASK = (1 << 31) - 1
MIN_RANKS, MAX_RANKS = 2, 16
MAX_VECTORS = 1024
STATUS_WORDS = 4

PAYLOAD_SENTINEL: dict[torch.dtype, int] = {
    torch.float32: -(1 << 31),
    torch.float16: 0x80008000 - (1 << 32),
    torch.bfloat16: 0x80008000 - (1 << 32),
    torch.float8_e4m3fn: 0x80808080 - (1 << 32),
    torch.float8_e5m2: 0x80808080 - (1 << 32),
}

FailureKind = Literal["timeout", "wrong_tag"]
WRONG_TAG, TIMEOUT = 1, 3
_FAILURES: dict[int, FailureKind] = {WRONG_TAG: "wrong_tag", TIMEOUT: "timeout"}


def declines(dtype: torch.dtype, head_dim: int, cp_size: int) -> str | None:
    """Why the kernel can't take this exchange, or None. The same on every rank."""
    if dtype not in PAYLOAD_SENTINEL:
        known = ", ".join(
            str(known).removeprefix("torch.") for known in PAYLOAD_SENTINEL
        )
        return f"partial_o is {dtype}; the kernel moves {known}"
    if not MIN_RANKS <= cp_size <= MAX_RANKS:
        return f"{cp_size} ranks; the kernel serves {MIN_RANKS} to {MAX_RANKS}"
    row_bytes = head_dim * dtype.itemsize
    if row_bytes <= 0 or row_bytes % WORD_BYTES:
        return (
            f"a row of {head_dim} {dtype} elements is {row_bytes} bytes, no positive "
            f"multiple of {WORD_BYTES}"
        )
    vectors = row_bytes // _vector_bytes(row_bytes)
    if vectors > MAX_VECTORS:
        return (
            f"a row of {row_bytes} bytes is {vectors} vectors of "
            f"{_vector_bytes(row_bytes)} bytes; the kernel holds {MAX_VECTORS}"
        )
    return None


def _vector_bytes(row_bytes: int) -> int:
    """Bytes that one thread moves at once: 16 where whole rows allow it, else 4."""
    return 16 if row_bytes % 16 == 0 else WORD_BYTES


@dataclass(frozen=True)
class KernelShape:
    """All that a compiled variant depends on. No pointer, stride, rank or batch.

    block: vectors of a row, rounded up to a power of two, at least a warp's 32.
    num_warps: warps of one program.
    """

    cp_size: int
    head_dim: int
    dtype: torch.dtype

    @cached_property
    def row_bytes(self) -> int:
        return self.head_dim * self.dtype.itemsize

    @cached_property
    def vector_bytes(self) -> int:
        return _vector_bytes(self.row_bytes)

    @cached_property
    def vectors(self) -> int:
        return self.row_bytes // self.vector_bytes

    @cached_property
    def block(self) -> int:
        return max(32, _power_of_two(self.vectors))

    @cached_property
    def others_pad(self) -> int:
        return _power_of_two(self.cp_size - 1)

    @cached_property
    def num_warps(self) -> int:
        """One vector a thread: NOTE [one owner] in protocol.py. Two a thread were
        slower at every batch (benchmarks/RESULTS.md)."""
        return self.block // 32

    @cached_property
    def awaited(self) -> int:
        """Messages that a thread awaits at once, all of them where registers allow it.

        Each wait has its own clock: ``others_pad / awaited`` of them may add up.
        """
        return min(self.others_pad, 64 // max(4, self.num_warps))


def _power_of_two(count: int) -> int:
    """The smallest power of two that is at least ``count``."""
    return 1 << (count - 1).bit_length()


@dataclass(frozen=True)
class SlotGeometry:
    """Sizes and offsets of one rank's buffer; equal on all ranks of the group.

    rows: how many (token, local head) rows the slot holds: ``max_tokens * H / N``.
    """

    cp_size: int
    rows: int
    head_dim: int
    dtype: torch.dtype

    def __post_init__(self) -> None:
        reason = declines(self.dtype, self.head_dim, self.cp_size)
        assert reason is None, reason
        assert self.rows > 0, self.rows
        assert self._messages < 1 << 31, (self.rows, "the kernel counts in 32 bits")

    @cached_property
    def shape(self) -> KernelShape:
        return KernelShape(self.cp_size, self.head_dim, self.dtype)

    @property
    def payload_offset(self) -> int:
        return 0

    @cached_property
    def payload_bytes(self) -> int:
        """Payload region; its length is padded to 16 so that headers are aligned."""
        return -(-self._messages * self.shape.row_bytes // 16) * 16

    @property
    def lse_offset(self) -> int:
        return self.payload_bytes

    @cached_property
    def lse_bytes(self) -> int:
        """Header region: LSE and tag of every message."""
        return self._messages * HEADER_BYTES

    @cached_property
    def total_bytes(self) -> int:
        """What one rank's symmetric buffer needs, at 16-byte alignment."""
        return self.lse_offset + self.lse_bytes

    @property
    def _messages(self) -> int:
        return PHASES * self.cp_size * self.rows


def initialise(buffer: Tensor, geometry: SlotGeometry) -> None:
    """Empty a slot: every word of ``buffer`` (uint8, >= total_bytes) is a sentinel.

    The caller also zeroes epochs and status, and lets all ranks meet before the first
    launch. Meeting again, after all of that, is also the only way to use a slot again
    whose status isn't zero.
    """
    assert buffer.dtype == torch.uint8, buffer.dtype
    assert buffer.numel() >= geometry.total_bytes, (buffer.numel(), geometry)
    assert buffer.data_ptr() % 16 == 0, "a slot starts at a multiple of 16 bytes"
    words = buffer[: geometry.total_bytes].view(torch.int32)
    first_header = geometry.lse_offset // WORD_BYTES
    words[:first_header].fill_(PAYLOAD_SENTINEL[geometry.dtype])
    words[first_header:].fill_(HEADER_SENTINEL)


@dataclass(frozen=True)
class Failure:
    """Why a slot is spoilt. row: ``token * h + head``. epoch: the row's use, from 0."""

    kind: FailureKind
    row: int
    source_rank: int
    epoch: int


def read_failure(status: Tensor) -> Failure | None:
    """The failure that the kernel left in ``status`` (int32[4]), or None.

    For a device tensor this waits for the device; for a pinned one it is a plain read
    that may lag the kernel.
    """
    code, row, source_rank, epoch = status.tolist()
    if code == 0:
        return None
    return Failure(_FAILURES[code], row, source_rank, epoch)
