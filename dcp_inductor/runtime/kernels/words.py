"""Device words: how the exchange kernel touches memory, and what a word holds.

Protocol and addresses stay with protocol.py. A *word* is 32 bits; ``address`` is a tile
of int64 addresses and ``mask`` one of booleans, of one shape. A *vector* is four words
(wide) or one (narrow), and what one thread moves at once.

NOTE [memory accesses]
Peer memory and the own slot are accessed by ``ld/st.relaxed.sys``: never held back,
merged, or served from L1. Vectors are spelled out in PTX because the plain operations
give neither: ``tl.load(volatile=True)`` becomes as many single-word loads as the
compiler can't prove aligned, and ``tl.store`` is a weak store. No fence is needed, see
NOTE [sentinel word]: a message has no part that vouches for another part.
Inline assembly runs once in every thread that holds an element: NOTE [one owner] in
protocol.py. Triton's interpreter has no assembly and takes the plain operations.
"""

from __future__ import annotations

import triton
import triton.language as tl

# Triton reads annotations: of a device function's parameters only constants have one.
# mypy: allow-untyped-defs, allow-incomplete-defs

INTERPRETED: bool = triton.knobs.runtime.interpret
_INTERPRET = tl.constexpr(INTERPRETED)


@triton.jit
def load_vector(address, mask, WIDE: tl.constexpr):
    """Four words from each address; a narrow vector is one word, four times."""
    if _INTERPRET:
        pointer = address.to(tl.pointer_type(tl.int32))
        a = tl.load(pointer, mask, 0, volatile=True)
        b, c, d = a, a, a
        if WIDE:
            b = tl.load(pointer + 1, mask, 0, volatile=True)
            c = tl.load(pointer + 2, mask, 0, volatile=True)
            d = tl.load(pointer + 3, mask, 0, volatile=True)
    elif WIDE:
        a, b, c, d = tl.inline_asm_elementwise(
            "{ .reg .pred p; setp.ne.b32 p, $5, 0;"
            " mov.b32 $0, 0; mov.b32 $1, 0; mov.b32 $2, 0; mov.b32 $3, 0;"
            " @p ld.relaxed.sys.global.v4.b32 {$0, $1, $2, $3}, [$4]; }",
            "=r,=r,=r,=r,l,r",
            [address, mask.to(tl.int32)],
            dtype=(tl.int32, tl.int32, tl.int32, tl.int32),
            is_pure=False,
            pack=1,
        )
    else:
        a = tl.inline_asm_elementwise(
            "{ .reg .pred p; setp.ne.b32 p, $2, 0; mov.b32 $0, 0;"
            " @p ld.relaxed.sys.global.b32 $0, [$1]; }",
            "=r,l,r",
            [address, mask.to(tl.int32)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
        b, c, d = a, a, a
    return a, b, c, d


@triton.jit
def store_vector(address, a, b, c, d, mask, WIDE: tl.constexpr):
    """Four words to each address; of a narrow vector the first."""
    if _INTERPRET:
        pointer = address.to(tl.pointer_type(tl.int32))
        tl.store(pointer, a, mask)
        if WIDE:
            tl.store(pointer + 1, b, mask)
            tl.store(pointer + 2, c, mask)
            tl.store(pointer + 3, d, mask)
    elif WIDE:
        tl.inline_asm_elementwise(
            "{ .reg .pred p; setp.ne.b32 p, $6, 0; mov.b32 $0, 0;"
            " @p st.relaxed.sys.global.v4.b32 [$1], {$2, $3, $4, $5}; }",
            "=r,l,r,r,r,r,r",
            [address, a, b, c, d, mask.to(tl.int32)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
    else:
        tl.inline_asm_elementwise(
            "{ .reg .pred p; setp.ne.b32 p, $3, 0; mov.b32 $0, 0;"
            " @p st.relaxed.sys.global.b32 [$1], $2; }",
            "=r,l,r,r",
            [address, a, mask.to(tl.int32)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )


@triton.jit
def load_pair(address, mask):
    """Two words from each address, a multiple of 8."""
    if _INTERPRET:
        pointer = address.to(tl.pointer_type(tl.int32))
        a = tl.load(pointer, mask, 0, volatile=True)
        b = tl.load(pointer + 1, mask, 0, volatile=True)
    else:
        a, b = tl.inline_asm_elementwise(
            "{ .reg .pred p; setp.ne.b32 p, $3, 0; mov.b32 $0, 0; mov.b32 $1, 0;"
            " @p ld.relaxed.sys.global.v2.b32 {$0, $1}, [$2]; }",
            "=r,=r,l,r",
            [address, mask.to(tl.int32)],
            dtype=(tl.int32, tl.int32),
            is_pure=False,
            pack=1,
        )
    return a, b


@triton.jit
def store_pair(address, a, b, mask):
    """Two words to each address, a multiple of 8."""
    if _INTERPRET:
        pointer = address.to(tl.pointer_type(tl.int32))
        tl.store(pointer, a, mask)
        tl.store(pointer + 1, b, mask)
    else:
        tl.inline_asm_elementwise(
            "{ .reg .pred p; setp.ne.b32 p, $4, 0; mov.b32 $0, 0;"
            " @p st.relaxed.sys.global.v2.b32 [$1], {$2, $3}; }",
            "=r,l,r,r,r",
            [address, a, b, mask.to(tl.int32)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )


@triton.jit
def clock(polls):
    """Nanoseconds; in the interpreter, polls."""
    if _INTERPRET:
        now = polls.to(tl.int64)
    else:
        now = tl.inline_asm_elementwise(
            "mov.u64 $0, %globaltimer;", "=l", [], tl.int64, is_pure=False, pack=1
        )
    return now


@triton.jit
def as_pointer(address):
    """An address in this rank's own bookkeeping as a pointer to words."""
    return address.to(tl.pointer_type(tl.int32))


@triton.jit
def element(word, INDEX: tl.constexpr, DTYPE: tl.constexpr):
    """Element ``INDEX`` of a word as fp32."""
    if DTYPE.primitive_bitwidth == 32:
        value = word.to(tl.float32, bitcast=True)
    elif DTYPE.is_bf16():
        high = word << 16 if INDEX == 0 else word & -65536
        value = high.to(tl.float32, bitcast=True)
    elif DTYPE.primitive_bitwidth == 16:
        half = (word >> (16 * INDEX)).to(tl.int16)
        value = half.to(DTYPE, bitcast=True).to(tl.float32)
    else:
        byte = (word >> (8 * INDEX)).to(tl.int8)
        value = byte.to(DTYPE, bitcast=True).to(tl.float32)
    return value


@triton.jit
def element_bits(value, DTYPE: tl.constexpr):
    """An fp32 value rounded to DTYPE, as the low bits of a word."""
    if DTYPE.primitive_bitwidth == 32:
        bits = value.to(tl.int32, bitcast=True)
    elif DTYPE.primitive_bitwidth == 16:
        bits = value.to(DTYPE).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
    else:
        bits = value.to(DTYPE).to(tl.int8, bitcast=True).to(tl.int32) & 0xFF
    if tl.float8e5 == DTYPE:  # The conversion saturates.
        bits = tl.where(value == float("inf"), 0x7C, bits)
        bits = tl.where(value == float("-inf"), 0xFC, bits)
    return bits
